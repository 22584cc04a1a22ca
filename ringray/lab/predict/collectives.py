"""Seconds of one collective among neighbouring ranks: measured within a node, else by the links.

Imports numpy only.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ringray.lab.predict import measured
from ringray.lab.predict.hardware import Fleet

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "alltoall"]
_ITEMSIZE = 2  # bytes of a measured element


def seconds(on: Fleet, operation: Operation, ranks: int, size: float) -> float:
    """Returns the seconds of a collective of ``ranks`` that are ``on.stride`` apart; ``size``:
    bytes of the whole result of a gather, of the whole input of a reduction, of what a rank
    exchanges with all, itself included."""
    if ranks == 1:
        return 0.0
    inner, outer = on.hardware.inner, on.hardware.outer
    near = min(ranks, max(1, on.per_node // on.stride))  # on one node
    twice = 1 + (operation == "all_reduce")
    within = twice * size * (1 - 1 / near) / inner.bandwidth + inner.latency
    if on.hardware.collectives is not None and near > 1:
        within = _measured(on.hardware.collectives, operation, near, size)
    if near == ranks:
        return within
    # What is gathered comes once into each node; each rank there receives a part.
    shared = 1 if operation == "alltoall" else near
    crowd = min(outer.ranks, on.per_node)
    between = twice * size * (1 - near / ranks) / shared * crowd / outer.bandwidth
    return max(within, between) + outer.latency


def _measured(system: str, operation: Operation, ranks: int, size: float) -> float:
    """Returns seconds between measured sizes and ranks. More bytes than those take longer at the
    rate of the last, more ranks by what each sends of the whole."""
    table = measured.read(system)[operation]
    sizes, by_ranks = table.at * _ITEMSIZE, {}
    for (count,), times in table.seconds.items():
        last = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        seconds = np.interp(size, sizes, times) + max(0.0, size - sizes[-1]) * last
        by_ranks[count] = np.log(seconds)
    most = max(by_ranks)
    further = (1 - 1 / ranks) / (1 - 1 / most) if ranks > most else 1.0
    return float(np.exp(measured.between(ranks, by_ranks.items()))) * further
