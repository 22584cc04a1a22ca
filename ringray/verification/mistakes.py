"""Recognition of a wrong result as a kind of mistake.

A wrong result alone says little. Most mistakes of sequence parallelism can be made on purpose in
one process: the model runs on each shard by itself, with positions that begin anew on each shard,
or without documents; a loss is the mean of means, or its labels are shifted within shards. The
variant that gives the numbers of the ranks says what they do.

Shape legend: B rows of a batch, S tokens of a row, R rows of one shard, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ringray.verification import batches
from ringray.verification.batches import IGNORED
from ringray.verification.compare import BatchComparison, Origin, cross_entropy, relative, whole
from ringray.verification.dependence import wrong_dependence
from ringray.verification.observation import Array, Observation
from ringray.verification.world import Refused

# A variant is recognised if it explains all but this share of the difference.
_EXPLAINED = 0.05
# A difference below this share of what other ranks' keys contribute is one of rounding; bfloat16
# rounds by 2^-9 of a number, and a row sees several.
_ROUNDING = 2.0**-7


def of_logits(case: BatchComparison) -> str:
    """Returns the kind of mistake by which logits differ."""
    if not all(np.isfinite(x.logits).all() for x in case.ranks):
        return "not-finite"
    best, least = "", _EXPLAINED * case.error
    for name, logits in _variants(case):
        error = relative(case.logits, logits)
        if error < least:
            best, least = name, error
    if best:
        return best
    place = case.begins
    from_shard, others, error = _distances(case, place)
    alone = from_shard < _EXPLAINED * others
    if place.layer is not None and not _mixes(case, place.layer):
        # Above all attention nothing is a matter of keys.
        return "positions-restart" if alone else "local"
    if alone:
        return "own-shard"
    # Of the first wrong layer: layers above it hide by which way a row knows of a token.
    if (wrong := wrong_dependence(case, place.layer)) is not None:
        return wrong.mistake
    if _counted_twice(case, place):
        return "keys-twice"
    return "precision" if error < _ROUNDING * others else "attention"


def _run(case: BatchComparison, batch: dict[str, Array], **options: bool) -> Observation | None:
    """Runs one process on a batch, which it may refuse."""
    try:
        return case.world.alone(batch, backward=False, **options)
    except Refused:
        return None


def _variants(case: BatchComparison) -> Iterator[tuple[str, Array]]:
    """Generates logits (B * S, V) of one process that makes a mistake on purpose."""
    # Squares of distances without |a|^2, which is the same for all: (B * S, B * S) and no V.
    gaps = np.square(case.flat).sum(-1) - 2 * case.logits @ case.flat.T
    yield "order", case.flat[gaps.argmin(1)]
    if not case.shared:
        return
    for name, batch in _changed_batches(case):
        if (run := _run(case, batch)) is not None:
            yield name, run.logits.reshape(case.flat.shape)
    runs = [run for n in range(len(case.ranks)) if (run := _run(case, _shard(case, n)))]
    if len(runs) == len(case.ranks):
        yield "own-shard", whole(case.ranks, [x.logits for x in runs], len(case.flat))


def _shard(case: BatchComparison, number: int) -> dict[str, Array]:
    """Returns the batch of a rank's own rows."""
    places = case.ranks[number].rows.clip(min=0)  # ranks may hold other rows of the batch, too
    return {name: x.ravel()[places] for name, x in case.batch.items() if x.ndim == 2}


def _changed_batches(case: BatchComparison) -> Iterator[tuple[str, dict[str, Array]]]:
    """Generates batches by which one process makes a mistake of positions or of documents."""
    positions = case.batch["position_ids"]
    restarted, contiguous = positions.copy(), positions.copy()
    for number, rank in enumerate(case.ranks):
        size = rank.rows.shape[1]
        held = rank.rows[0] >= 0
        columns = rank.rows[0][held] % case.length
        restarted[:, columns] = np.arange(size)[held]
        # Ranks that hold other rows of the batch begin anew.
        contiguous[:, columns] = number * size % case.length + np.arange(size)[held]
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


def _distances(case: BatchComparison, place: Origin) -> tuple[float, ...]:
    """Returns how far what the first wrong layer gives on its rank is from what one process gives
    that runs on that shard by itself, how far that is from one that has the whole batch, which is
    what other ranks contribute, and how far the rank is from the latter."""
    nothing = (math.inf, 0.0, math.inf)
    if place.layer is None or not case.shared:
        return nothing
    run = _run(case, _shard(case, place.rank), layers=True)
    if run is None or place.layer not in dict(run.layers):
        return nothing
    rows = case.ranks[place.rank].rows
    alone, ranks = case.layers
    right = alone[place.layer].reshape(-1, *alone[place.layer].shape[2:])[rows[rows >= 0]]
    got, own = (x[place.layer][rows >= 0] for x in (ranks[place.rank], dict(run.layers)))
    gaps = got - own, own - right, got - right
    return tuple(float(np.linalg.norm(x)) for x in gaps)


def _mixes(case: BatchComparison, layer: str) -> bool:
    """Tells whether what a layer gives for a token depends on another token."""
    before, after = (
        dict(case.alone(batch, backward=False, layers=True).layers)[layer][:, 1:]
        for batch in (case.batch, batches.changed(case.batch, 0))
    )
    return relative(after, before) > case.allowed


def _counted_twice(case: BatchComparison, place: Origin) -> bool:
    """Tells whether the first row that differs is the one of a process whose batch has some of the
    tokens before it several times, with the same positions."""
    if place.layer is None or not place.token or "cu_seqlens" in case.batch:
        return False
    alone, ranks = case.layers
    rows = case.ranks[place.rank].rows
    batch_rows = np.unique(rows[rows >= 0] // case.length)  # of that rank
    mine = {name: x[batch_rows] for name, x in case.batch.items()}
    right = alone[place.layer][batch_rows, place.token]
    got = ranks[place.rank][place.layer][(rows >= 0) & (rows % case.length == place.token)]
    before = np.arange(place.token)
    held = [np.isin(before, x.rows[0] % case.length) for x in case.ranks]
    # All, those of all other ranks, and those of each rank; once more, or once for each rank.
    for keys in (before, before[~held[place.rank]], *(before[x] for x in held)):
        for times in {1, len(case.ranks) - 1} if len(keys) else ():
            batch = batches.columns(mine, np.r_[np.tile(keys, times), before, place.token])
            batch["attention_mask"] = np.ones_like(batch["input_ids"])
            run = _run(case, batch, layers=True)
            layers = {} if run is None else dict(run.layers)
            if place.layer in layers:
                error = np.linalg.norm(layers[place.layer][:, -1] - got)
                if error < _EXPLAINED * np.linalg.norm(right - got):
                    return True
    return False


def of_loss(case: BatchComparison) -> str:
    """Returns the kind of mistake by which a loss differs, from right logits."""
    got, want, ranks = case.loss, case.exact.loss, len(case.ranks)
    labels = case.batch["shift_labels"].ravel()
    empty = [not (labels[x.rows[x.rows >= 0]] != IGNORED).any() for x in case.ranks]
    if not np.isfinite(got):
        lost = [not np.isfinite(x.loss) for x in case.ranks]
        return "no-labels" if lost == empty else "not-finite"
    # What is not cross entropy, such as a router's loss, is in all of them.
    rest = rest_of_loss(case)
    named = [(name, loss + rest) for name, loss in _losses(case) if np.isfinite(loss)]
    named += [("multiplied", want * ranks)]
    # Without labels on some ranks, it may as well be the mean of means, of which some are 0.
    named += [] if any(empty) else [("divided", want / ranks)]
    if rest:
        named += [("rest-divided", want - rest + rest / ranks)]
        named += [("rest-multiplied", want - rest + rest * ranks)]
    name, loss = min(named, key=lambda x: abs(got - x[1]))
    if abs(got - loss) < _EXPLAINED * abs(got - want):
        return name
    if not rest:
        return "loss"
    return _of_labels(case) if labels_matter(case) else "router-loss"


def rest_of_loss(case: BatchComparison) -> float:
    """Returns what the loss of one process has beside cross entropy of the next token."""
    rest = case.exact.loss - cross_entropy(case.flat, case.batch["shift_labels"].ravel())
    return rest if abs(rest) > 1e-6 * abs(case.exact.loss) else 0.0


def labels_matter(case: BatchComparison) -> bool:
    """Tells whether what the loss has beside cross entropy depends on labels."""
    other = _relabelled(case, slice(None))
    loss = case.alone(other, exact=True, backward=False).loss
    rest = loss - cross_entropy(case.flat, other["shift_labels"].ravel())
    return abs(rest - rest_of_loss(case)) > 1e-6 * abs(loss)


def label_changes(case: BatchComparison, token: int) -> tuple[float, float]:
    """Returns how the loss of one process, and that of all ranks, changes with the label of a
    token."""
    other = BatchComparison(case.world, _relabelled(case, token), backward=False)
    return other.exact.loss - case.exact.loss, other.loss - case.loss


def _relabelled(case: BatchComparison, token: int | slice) -> dict[str, Array]:
    labels = case.batch["labels"].copy()
    labels[:, token] = np.roll(labels, 1, axis=1)[:, token]
    ends = case.batch.get("cu_seqlens")
    return batches.batch(case.batch["input_ids"], labels=labels, documents=ends)


def _of_labels(case: BatchComparison) -> str:
    """Returns the kind of mistake by which the first labels of a shard count otherwise."""
    if not case.edges:
        return "loss"
    first = case.edges[0]
    # A label in the middle of a shard shows by how much others are wrong.
    changes = [label_changes(case, x) for x in (first, first + 1, first // 2)]
    wrong = [relative(got, want) for want, got in changes]
    return "labels-ahead" if max(wrong[:2]) > 4 * wrong[2] else "loss"


def _losses(case: BatchComparison) -> Iterator[tuple[str, float]]:
    """Generates losses of one process that makes a mistake on purpose."""
    logits, labels = case.flat, case.batch["shift_labels"].ravel()
    local = [rank.rows[rank.rows >= 0] for rank in case.ranks]
    means = np.array([cross_entropy(logits[rows], labels[rows]) for rows in local])
    # A rank without labels has none, or 0.
    yield "mean-of-means", float(np.nanmean(means))
    yield "mean-of-means", float(np.nan_to_num(means).mean())
    total = cross_entropy(logits, labels) * int((labels != IGNORED).sum())
    # Labels and rows of padding, which only differ where there is such a row.
    yield "padding-counted", total / labels.size
    yield "padding-counted", total / sum(rank.rows.size for rank in case.ranks)
    ignoring = case.batch["labels"].ravel()
    for name, roll in (("labels-in-shards", False), ("labels-rolled", True)):
        shifted = np.full_like(ignoring, IGNORED)
        for rank in case.ranks:
            for row in rank.rows:
                held = row[row >= 0]
                shifted[held[:-1]] = ignoring[held[1:]]
                if roll:
                    shifted[held[-1:]] = ignoring[held[:1]]
        yield name, cross_entropy(logits, shifted)
    over = np.full_like(case.batch["labels"], IGNORED)
    over[:, :-1] = case.batch["input_ids"][:, 1:]
    yield "labels-documents", cross_entropy(logits, over.ravel())


def of_gradients(case: BatchComparison, rank: int) -> tuple[str, str]:
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
