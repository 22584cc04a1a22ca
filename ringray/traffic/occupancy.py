"""Rows that each rank has at each step of a walk: chunks, and sums of gradients.

A chunk is there from the step at which its transfer begins until it has been computed with, a
packed copy until it has been sent, a sum of gradients from its visit until it has left. All of it
is a fold over the tables from which ``script`` lists the transfers. Imports numpy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.traffic.hulls import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.signedinteger]


class Walked(NamedTuple):
    """Rows of one pass beside a rank's own, ``[rank, step]``.

    ``chunks``, ``sums``: rows in memory. ``visible``: visible pairs computed.
    """

    chunks: Floats
    sums: Floats
    visible: Floats


def walked(moved: Traffic, shard: int, *, backward: bool) -> Walked:
    """Returns all steps of one pass, and one more in which the last sums come home."""
    route = moved.route
    step, posted, rank, handed_by = map(
        np.asarray, (route.step, route.posted, route.rank, route.handed_by)
    )
    steps = int(step.max()) + 2

    def at(rows: Ints, ranks: Ints, when: Ints) -> Floats:
        """Sums ``rows`` by rank and step."""
        width = steps + 1  # sums that come home in the last step leave after it
        places, cells = ranks * width + when, route.ranks * width
        folded = np.bincount(np.broadcast_to(places, rows.shape).ravel(), rows.ravel(), cells)
        by_step = folded.reshape(-1, width)[:, :steps]
        return by_step.astype(np.float64, copy=False)

    def between(rows: Ints, ranks: Ints, first: Ints, stop: Ints) -> Floats:
        """Sums ``rows`` by rank over the steps ``first`` to ``stop - 1``."""
        return np.cumsum(at(rows, ranks, first) - at(rows, ranks, stop), 1)

    arrive = moved.chunk_rows
    holds = moved.rows(moved.held)
    holds[:, :, 0] = shard
    packed = np.where(arrive < holds[:, :, route.source], arrive, 0)
    chunks = between(arrive, rank, posted, step + 1)
    chunks += between(packed, handed_by, posted, step)
    visible = at(moved.visible, rank, step)
    if not backward:
        return Walked(chunks, np.zeros_like(visible[:1, :1]), visible)
    leave = moved.sum_rows
    sums = between(leave, rank, step, step + 2)
    sums += at(leave, moved.sums_to, step + 1)
    return Walked(chunks, sums, visible)
