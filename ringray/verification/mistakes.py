"""Kinds of mistakes, and how a wrong result is recognised as one of them.

A wrong result alone says little. Most mistakes of sequence parallelism can be made on purpose in
one process: the model runs on each shard by itself, with positions that begin anew on each shard,
or without documents; a loss is the mean of means, or its labels are shifted within shards. The
variant that gives the numbers of the ranks says what they do.

Shape legend: B rows of a batch, S tokens of a row, R rows of one shard, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringray.verification import batches
from ringray.verification.batches import IGNORED
from ringray.verification.compare import Compared, relative, whole
from ringray.verification.observation import Array
from ringray.verification.world import Refused

MISTAKES = {
    "own-shard": "each rank attends to its own rows only: the ring is bypassed",
    "positions-restart": "positions begin anew on every rank, as if each shard were a sequence",
    "positions-contiguous": "positions are those of contiguous shards, rows are dealt otherwise",
    "positions-packed": "positions do not begin anew with each document",
    "documents": "documents see each other: a rank does not get their boundaries",
    "order": "rows stand in another order than the target's shard() says",
    "rows-lost": "a token is on no rank, or on several",
    "future": "tokens see later ones: the causal mask is that of local rows",
    "lost-keys": "tokens do not see keys that another rank holds: a hop is left out",
    "keys-twice": "rows are right until they see keys of several kinds: some are counted twice, of "
    "replicated tokens or of a hop that is merged twice, or positions jump between shards",
    "attention": "each row depends on the right tokens, but with another weight: the scale, or "
    "positions that are off",
    "not-finite": "a result is not finite: rows that see no key, or a rank without "
    "labels, are not handled",
    "mean-of-means": "the loss is the mean of the ranks' means, which weighs tokens by the number "
    "of labels on their rank",
    "labels-in-shards": "labels are shifted within each shard: the label of its last row is lost",
    "labels-rolled": "labels are rolled within each shard: its last row predicts its first token",
    "labels-documents": "the last token of a document predicts the first one of the next",
    "divided": "it is divided by the number of ranks once too often",
    "multiplied": "it is multiplied by the number of ranks: summed where it should be averaged",
    "padding-counted": "ignored or padded tokens are counted",
    "padding-seen": "rows that fill up a shard are seen as keys",
    "labels-ahead": "labels further ahead than the next one are shifted within each shard",
    "rest-divided": "what the loss has beside cross entropy of the next token is divided by the "
    "number of ranks once too often",
    "rest-multiplied": "what the loss has beside cross entropy of the next token is summed over "
    "ranks where it should be averaged",
    "router-loss": "each rank has the router's loss of its own tokens: the mean of those is not "
    "that of all tokens",
    "loss": "the loss is another one than that of one process",
    "not-reduced": "each rank has the gradient of its own rows: nothing sums them over the ring",
    "backward": "the forward is right, and gradients are from there down not: backward, attention "
    "uses other keys and values than forward, or those of other ranks get no gradient",
    "gradient": "the gradient is another one than that of one process",
    "norm": "the norm of the gradients is not that of the whole gradient",
    "fails": "an error of some ranks only: in a training the others wait for them for ever",
    "hangs": "ranks wait for ever, or not for each other",
    "dropout-equal": "ranks draw the same numbers for different tokens",
    "step": "a step of training changes other numbers, or by another amount",
    "resume": "the state of the training is saved or loaded in part, or is another rank's",
    "generation": "new tokens have other positions, or do not see all tokens before them",
    "follows": "it may follow from what is wrong with",
}  # fmt: skip

# A variant is recognised if it explains all but this share of the difference.
_EXPLAINED = 0.05


def of_logits(case: Compared) -> str:
    """Returns the kind of mistake by which logits differ."""
    if not np.isfinite(np.concatenate([x.logits.ravel() for x in case.ranks])).all():  # type: ignore[union-attr]
        return "not-finite"
    best, least = "", _EXPLAINED * case.error
    for name, logits in _variants(case):
        error = relative(case.logits, logits)
        if error < least:
            best, least = name, error
    return best


def _variants(case: Compared) -> Iterator[tuple[str, Array]]:
    """Generates logits (B * S, V) of one process that makes a mistake on purpose."""
    # Squares of distances without |a|^2, which is the same for all: (B * S, B * S) and no V.
    gaps = np.square(case.flat).sum(-1) - 2 * case.logits @ case.flat.T
    yield "order", case.flat[gaps.argmin(1)]
    if not case.shared:
        return
    for name, batch in _changed_batches(case):
        try:
            logits = case.world.alone(batch, backward=False).logits
        except Refused:
            continue
        if logits is not None:
            yield name, logits.reshape(case.flat.shape)
    parts = []
    for rank in case.ranks:
        columns = (rank.rows[0].clip(min=0)) % case.length
        own = {name: x[:, columns] for name, x in case.batch.items() if x.ndim == 2}
        try:
            logits = case.world.alone(own, backward=False).logits
        except Refused:
            return
        assert logits is not None
        parts.append(logits)
    yield "own-shard", whole(case.ranks, parts, len(case.flat))


def _changed_batches(case: Compared) -> Iterator[tuple[str, dict[str, Array]]]:
    """Generates batches by which one process makes a mistake of positions or of documents."""
    positions = case.batch["position_ids"]
    restarted, contiguous = positions.copy(), positions.copy()
    for number, rank in enumerate(case.ranks):
        size = rank.rows.shape[1]
        held = rank.rows[0] >= 0
        columns = rank.rows[0][held] % case.length
        restarted[:, columns] = np.arange(size)[held]
        contiguous[:, columns] = number * size + np.arange(size)[held]
    # A mask that masks nothing keeps transformers from taking such positions for documents.
    batch = case.batch | {"attention_mask": np.ones_like(positions)}
    yield "positions-restart", batch | {"position_ids": restarted}
    yield "positions-contiguous", batch | {"position_ids": contiguous}
    if "cu_seqlens" in batch:
        running = np.broadcast_to(np.arange(case.length), positions.shape).copy()
        yield "positions-packed", batch | {"position_ids": running}
        batch.pop("cu_seqlens")
        yield "documents", batch
        yield "documents", batch | {"position_ids": running}


def of_loss(case: Compared) -> str:
    """Returns the kind of mistake by which a loss differs, from right logits."""
    got, want, ranks = case.loss, case.exact.loss, len(case.ranks)
    if not np.isfinite(got):
        return "not-finite"
    assert want is not None
    # What is not cross entropy, such as a router's loss, is in all of them.
    rest = beside(case)
    named = {name: loss + rest for name, loss in _losses(case)}
    named |= {"divided": want / ranks, "multiplied": want * ranks}
    if rest:
        named |= {"rest-divided": want - rest + rest / ranks}
        named |= {"rest-multiplied": want - rest + rest * ranks}
    name, loss = min(named.items(), key=lambda x: abs(got - x[1]))
    if abs(got - loss) < _EXPLAINED * abs(got - want):
        return name
    if not rest:
        return "loss"
    return _of_labels(case) if labels_matter(case) else "router-loss"


def beside(case: Compared) -> float:
    """Returns what the loss of one process has beside cross entropy of the next token."""
    assert case.exact.loss is not None
    rest = case.exact.loss - _mean(case.flat, case.batch["shift_labels"].ravel())
    return rest if abs(rest) > 1e-6 * abs(case.exact.loss) else 0.0


def labels_matter(case: Compared) -> bool:
    """Tells whether what the loss has beside cross entropy depends on labels."""
    other = _relabelled(case, slice(None))
    loss = case.world.alone(other, exact=True, backward=False).loss
    assert loss is not None
    rest = loss - _mean(case.flat, other["shift_labels"].ravel())
    return abs(rest - beside(case)) > 1e-6 * abs(loss)


def label_changes(case: Compared, token: int) -> tuple[float, float]:
    """Returns how the loss of one process, and that of all ranks, changes with the label of a
    token."""
    other = Compared(case.world, _relabelled(case, token), backward=False)
    assert case.exact.loss is not None
    assert other.exact.loss is not None
    return other.exact.loss - case.exact.loss, other.loss - case.loss


def _relabelled(case: Compared, token: int | slice) -> dict[str, Array]:
    labels = case.batch["labels"].copy()
    labels[:, token] = np.roll(labels, 1, axis=1)[:, token]
    ends = case.batch.get("cu_seqlens")
    return batches.batch(case.batch["input_ids"], labels=labels, documents=ends)


def _of_labels(case: Compared) -> str:
    """Returns the kind of mistake by which the first labels of a shard count otherwise."""
    if not case.edges:
        return "loss"
    first = case.edges[0]
    # A label in the middle of a shard shows by how much others are wrong.
    changes = [label_changes(case, x) for x in (first, first + 1, first // 2)]
    wrong = [abs(got - want) / max(abs(want), 1e-30) for want, got in changes]
    return "labels-ahead" if max(wrong[:2]) > 4 * wrong[2] else "loss"


def _losses(case: Compared) -> Iterator[tuple[str, float]]:
    """Generates losses of one process that makes a mistake on purpose."""
    logits, labels = case.flat, case.batch["shift_labels"].ravel()
    local = [(rank.rows[rank.rows >= 0], rank) for rank in case.ranks]
    means = [_mean(logits[rows], labels[rows]) for rows, _ in local]
    yield "mean-of-means", float(np.mean([x for x in means if np.isfinite(x)]))
    total = _mean(logits, labels) * int((labels != IGNORED).sum())
    yield "padding-counted", total / labels.size
    ignoring = case.batch["labels"].ravel()
    for name, roll in (("labels-in-shards", False), ("labels-rolled", True)):
        shifted = np.full_like(ignoring, IGNORED)
        for _, rank in local:
            for row in rank.rows:
                held = row[row >= 0]
                shifted[held[:-1]] = ignoring[held[1:]]
                if roll:
                    shifted[held[-1:]] = ignoring[held[:1]]
        yield name, _mean(logits, shifted)
    over = np.full_like(case.batch["labels"], IGNORED)
    over[:, :-1] = case.batch["input_ids"][:, 1:]
    yield "labels-documents", _mean(logits, over.ravel())
    # Labels and rows of padding, which only differ where there is such a row.
    yield "padding-counted", total / sum(rank.rows.size for rank in case.ranks)


def _mean(logits: Array, labels: Array) -> float:
    """Returns the mean cross entropy of rows with labels; NaN if there is none."""
    counted = labels != IGNORED
    if not counted.any():
        return float("nan")
    chosen = logits[counted]
    top = chosen.max(-1, keepdims=True)
    logs = np.log(np.exp(chosen - top).sum(-1)) + top[:, 0]
    return float((logs - chosen[np.arange(len(chosen)), labels[counted]]).mean())


def of_gradients(case: Compared, rank: int) -> tuple[str, str]:
    """Returns the kind of mistake by which gradients on a rank differ, and the first that does:
    backward, from the loss."""
    ranks, exact = len(case.ranks), case.exact.gradients
    got, other = case.ranks[rank].gradients, case.ranks[rank - 1].gradients
    errors = case.gradient_errors(case.ranks[rank])
    wrong = [name for name, error in errors.items() if not error <= case.allowed_gradient]
    # Backward, modules run in the opposite order; one without rows is told by its parameters'.
    layers = [name for name, _ in case.world.alone(case.batch, layers=True).layers]
    order = {name.partition("#")[0]: place for place, name in enumerate(layers)}
    last = max(reversed(wrong), key=lambda x: order.get(x.rpartition(".")[0], -1))
    if any(not np.isfinite(x).all() for rank in case.ranks for x in rank.gradients.values()):
        return "not-finite", last
    there = [name for name in wrong if name in got]
    if any(relative(other[x], got[x]) > case.allowed_gradient for x in there if x in other):
        return "not-reduced", last
    for name, factor in (("divided", 1 / ranks), ("multiplied", ranks)):
        gaps = [relative(got[x] / factor, exact[x]) for x in there]
        if gaps and max(gaps) < 10 * case.allowed_gradient:
            return name, last
    return "backward" if len(wrong) < len(errors) else "gradient", last
