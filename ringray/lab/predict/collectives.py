"""Seconds of one collective among neighbouring ranks.

Imports numpy only.
"""

from __future__ import annotations

from typing import Literal

from ringray.lab.predict.hardware import Fleet

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "alltoall"]


def seconds(on: Fleet, operation: Operation, ranks: int, size: float) -> float:
    """Returns the seconds of a collective of ``ranks`` that are ``on.stride`` apart; ``size``:
    bytes of the whole result of a gather, of the whole input of a reduction, of what a rank
    exchanges in all."""
    if ranks == 1:
        return 0.0
    inner, outer = on.hardware.inner, on.hardware.outer
    near = min(ranks, max(1, on.per_node // on.stride))  # on one node
    twice = 1 + (operation == "all_reduce")
    within = twice * size * (1 - 1 / near) / inner.bandwidth
    if near == ranks:
        return within + inner.latency
    crowd = min(outer.ranks, on.per_node)
    # What is gathered comes once into each node; each rank of it receives a part.
    shared = 1 if operation == "alltoall" else near
    between = twice * size * (1 - near / ranks) / shared * crowd / outer.bandwidth
    return max(within, between) + outer.latency
