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

from ringray.verification.batches import IGNORED
from ringray.verification.compare import Comparison, relative, whole
from ringray.verification.process import Array
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
    "attention": "each row depends on the right tokens, but with another weight: the scale, a hop "
    "that is merged twice, or positions that are off",
    "not-finite": "a result is not finite: rows that see no key are not handled",
    "mean-of-means": "the loss is the mean of the ranks' means, which weighs tokens by the number "
    "of labels on their rank",
    "labels-in-shards": "labels are shifted within each shard: the label of its last row is lost",
    "labels-rolled": "labels are rolled within each shard: its last row predicts its first token",
    "labels-documents": "the last token of a document predicts the first one of the next",
    "divided": "it is divided by the number of ranks once too often",
    "multiplied": "it is multiplied by the number of ranks: summed where it should be averaged",
    "padding-counted": "ignored or padded tokens are counted",
    "loss": "the loss is another one than that of one process",
    "not-reduced": "each rank has the gradient of its own rows: nothing sums them over the ring",
    "gradient": "the gradient is another one than that of one process",
    "norm": "the norm of the gradients is not that of the whole gradient",
    "fails": "an error of some ranks only: in a training the others wait for them for ever",
    "hangs": "ranks wait for ever, or not for each other",
}  # fmt: skip

# A variant is recognised if it explains all but this share of the difference.
_EXPLAINED = 0.05


def of_logits(case: Comparison) -> str:
    """Returns the kind of mistake by which logits differ."""
    if not np.isfinite(np.concatenate([x.logits.ravel() for x in case.ranks])).all():  # type: ignore[union-attr]
        return "not-finite"
    best, least = "", _EXPLAINED * case.error
    for name, logits in _variants(case):
        error = relative(case.logits, logits)
        if error < least:
            best, least = name, error
    return best


def _variants(case: Comparison) -> Iterator[tuple[str, Array]]:
    """Generates logits (B * S, V) of one process that makes a mistake on purpose."""
    nearest = np.abs(case.flat[None] - case.logits[:, None]).max(-1).argmin(1)
    yield "order", case.flat[nearest]
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


def _changed_batches(case: Comparison) -> Iterator[tuple[str, dict[str, Array]]]:
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


def of_loss(case: Comparison, got: float) -> str:
    """Returns the kind of mistake by which a loss differs, from right logits."""
    if not np.isfinite(got):
        return "not-finite"
    assert case.exact.loss is not None
    ranks = len(case.ranks)
    variants = dict(_losses(case))
    # What is not cross entropy, such as a router's loss, is in both.
    rest = case.exact.loss - variants.pop("right")
    named = {name: loss + rest for name, loss in variants.items()}
    named |= {"divided": case.exact.loss / ranks, "multiplied": case.exact.loss * ranks}
    gap = abs(got - case.exact.loss)
    name, loss = min(named.items(), key=lambda x: abs(got - x[1]))
    return name if abs(got - loss) < _EXPLAINED * gap else "loss"


def _losses(case: Comparison) -> Iterator[tuple[str, float]]:
    """Generates losses of one process that makes a mistake on purpose."""
    logits, labels = case.flat, case.batch["shift_labels"].ravel()
    yield "right", _mean(logits, labels)
    local = [(rank.rows[rank.rows >= 0], rank) for rank in case.ranks]
    means = [_mean(logits[rows], labels[rows]) for rows, _ in local]
    yield "mean-of-means", float(np.mean([x for x in means if np.isfinite(x)]))
    total = float(np.nansum([_mean(logits[r], labels[r]) * _count(labels[r]) for r, _ in local]))
    yield "padding-counted", total / labels.size
    plain = case.batch["labels"]
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
    over = np.full_like(plain, IGNORED)
    over[:, :-1] = plain[:, 1:]
    yield "labels-documents", _mean(logits, over.ravel())


def _count(labels: Array) -> int:
    return int((labels != IGNORED).sum())


def _mean(logits: Array, labels: Array) -> float:
    """Returns the mean cross entropy of rows with labels; NaN if there is none."""
    counted = labels != IGNORED
    if not counted.any():
        return float("nan")
    chosen = logits[counted]
    top = chosen.max(-1, keepdims=True)
    logs = np.log(np.exp(chosen - top).sum(-1)) + top[:, 0]
    return float((logs - chosen[np.arange(len(chosen)), labels[counted]]).mean())


def of_gradients(case: Comparison) -> tuple[str, str]:
    """Returns the kind of mistake by which gradients differ, and the first that does, seen from the
    loss."""
    ranks = len(case.ranks)
    errors = case.gradient_errors(case.ranks[0])
    wrong = [name for name, error in errors.items() if error > case.allowed_gradient]
    if not wrong:
        for rank in case.ranks:
            others = case.gradient_errors(rank)
            wrong = wrong or [name for name, x in others.items() if x > case.allowed_gradient]
    last = wrong[-1] if wrong else ""
    first, second = case.ranks[0].gradients, case.ranks[-1].gradients
    if any(not np.isfinite(x).all() for rank in case.ranks for x in rank.gradients.values()):
        return "not-finite", last
    if any(relative(second[name], first[name]) > case.allowed_gradient for name in wrong
           if name in first and name in second):  # fmt: skip
        return "not-reduced", last
    for name, factor in (("divided", 1 / ranks), ("multiplied", ranks)):
        if all(
            relative(first[x] / factor, case.exact.gradients[x]) < 10 * case.allowed_gradient
            for x in wrong
            if x in first
        ):
            return name, last
    return "gradient", last
