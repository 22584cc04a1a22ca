"""Packed documents on the rings of a proposal, and on one pool of all their ranks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

from ringray import partition, transport
from ringray.base.errors import UserError
from ringray.lab.predict.advise import Proposal
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.trial import lengths
from ringray.lab.trial.config import TrialConfig
from ringray.traffic.walk import BACKWARDS
from ringray.training.recipe import Degrees

_BATCHES = 4  # drawn from a table of lengths
_LARGEST_POOL = 512  # ranks: the tables of a larger one take long


class Pooled(NamedTuple):
    """Time (ms) of the attention of a layer, both passes, in the mean of batches in which each
    replica packs a sequence. ``rings``: of the slowest replica's ring; ``pool``: of one ring of all
    replicas, whose documents are dealt and sent with ``transport``."""

    ranks: int
    rings: float
    pool: float
    transport: str


def pooled(request: TrainingRequest, best: Proposal, table: lengths.Table) -> Pooled:
    """Compares the rings of a proposal with one pool of their ranks, on documents drawn from a
    table.

    Raises:
        UserError: the documents or the ranks are too many.
    """
    dp, config = best.degrees.dp, best.config.changed(backward=BACKWARDS[0])
    together = replace(best.degrees, dp=1, cp=dp * best.degrees.cp)
    if together.cp > _LARGEST_POOL:
        raise UserError(f"--lengths: got {together.cp} ranks of DP x CP, at most {_LARGEST_POOL}")
    batches = [
        [lengths.drawn(table, request.context, dp * batch + replica) for replica in range(dp)]
        for batch in range(_BATCHES)
    ]

    def ms(degrees: Degrees, config: TrialConfig, documents: tuple[int, ...]) -> float:
        return request.cost(degrees, config.changed(documents=documents)).time_ms

    rings = mean(max(ms(best.degrees, config, docs) for docs in batch) for batch in batches)
    whole = config.changed(
        ring_size=together.cp, seq_len=dp * request.context, partition=partition.BALANCED
    )
    pools = {}
    for name in (transport.DEALT, config.strategy.transport):
        with suppress(ValueError):  # it does not fit the larger ring
            pool_config = whole.changed(transport=name)
            pools[name] = mean(ms(together, pool_config, sum(batch, ())) for batch in batches)
    fastest = min(pools, key=pools.__getitem__)
    return Pooled(together.cp, rings, pools[fastest], fastest)
