"""Which token changes which row: one token becomes another one, and the rows that change are those
that depend on it.

Shape legend: B rows of a batch, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ringray.verification import batches
from ringray.verification.compare import BatchComparison, whole
from ringray.verification.observation import Array

# Shares of the largest change of a row: above one a row depends on a token, below the other it
# does not.
_DEPENDS, _DOES_NOT = 1e-3, 1e-6


class Dependence(NamedTuple):
    """A row that depends on what it does not in one process, or the opposite.

    ``token``: the row; ``changed``: what was changed, in words; ``depends``: on the ranks.
    """

    mistake: str
    token: int
    changed: str
    depends: bool


def wrong_dependence(case: BatchComparison, layer: str | None = None) -> Dependence | None:
    """Returns a wrong dependence of logits, or of the output of a layer: the first that one process
    has not, or else that only it has, for a wrong mask makes both."""
    every = [*_of_batch(case, layer), *_of_tokens(case, layer)]
    return min(every, key=lambda x: x.mistake == "lost-keys", default=None)


def _of_tokens(case: BatchComparison, layer: str | None) -> Iterator[Dependence]:
    documents = batches.document_of(case.batch)
    for changed in _tokens(case):
        changes = _changes(case, batches.changed(case.batch, changed), layer)
        want, got = (x.max(0) for x in changes)
        for token in np.flatnonzero((got > _DEPENDS) & (want < _DOES_NOT)):
            kind = "documents" if documents[token] != documents[changed] else "future"
            yield Dependence(kind, int(token), f"token {changed}", True)
        for token in np.flatnonzero((want > _DEPENDS) & (got < _DOES_NOT)):
            yield Dependence("lost-keys", int(token), f"token {changed}", False)


def _of_batch(case: BatchComparison, layer: str | None) -> Iterator[Dependence]:
    ids = case.batch["input_ids"]
    for row in {0, len(ids) - 1} if len(ids) > 1 else ():
        other = ids.copy()
        other[row] = other[row, ::-1]
        changes = _changes(case, case.batch | {"input_ids": other}, layer)
        want, got = (np.delete(x, row, 0).max(0) for x in changes)
        for depends, moves, rests in ((True, got, want), (False, want, got)):
            for token in np.flatnonzero((moves > _DEPENDS) & (rests < _DOES_NOT)):
                yield Dependence("batch", int(token), f"row {row} of the batch", depends)


def _changes(case: BatchComparison, batch: dict[str, Array], layer: str | None) -> list[Array]:
    """Returns the change of each row in one process, and on all ranks, (B, S), as shares of the
    largest one."""
    shares = []
    for together in (False, True):
        before, after = (_numbers(case, x, layer, together) for x in (case.batch, batch))
        gaps = np.abs(after - before).max(-1).reshape(-1, case.length)
        shares.append(gaps / max(float(gaps.max()), 1e-30))
    return shares


def _numbers(
    case: BatchComparison, batch: dict[str, Array], layer: str | None, together: bool
) -> Array:
    """Returns logits, or the output of a layer, of all rows, (B * S, width)."""
    options = case.options | {"backward": False, "layers": layer is not None}
    if together:
        runs = case.world.together(batch, **options)
    else:
        runs = [case.alone(batch, **options, exact=True)]
    rows = [x.logits if layer is None else dict(x.layers)[layer] for x in runs]
    return whole(runs, rows, case.exact.rows.size).reshape(case.exact.rows.size, -1)


def _tokens(case: BatchComparison) -> list[int]:
    """Returns tokens to change: the first and the last of each rank's runs of positions, and those
    beside the boundaries of documents."""
    # Striped ranks have as many runs as rows; two of each are enough.
    begins = case.edges[: 2 * len(case.ranks)]
    edges = {0, case.length - 2, *begins, *(x - 1 for x in begins)}
    ends = case.batch.get("cu_seqlens", np.zeros(0, dtype=np.int64))[1:-1]
    edges |= {int(x) for x in ends} | {int(x) - 1 for x in ends}
    return sorted(edges)
