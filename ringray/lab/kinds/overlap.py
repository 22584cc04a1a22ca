"""Overlap: how much of the time that messages need is hidden behind computation.

Each repeat runs the pass of ``latency`` with a timeline, then its messages alone: the tape of the
first pass, played with nothing computed between. So both are taken close together, on a machine
whose speed drifts. Of each rank the median over repeats counts, and of these the largest:

* ``compute_ms``: attention alone, the sum of its spans in the pass;
* ``transfer_ms``: all messages alone, from a barrier until the last has come;
* ``wait_ms``: the sum of all waits in the pass; on CUDA the time for which the device had nothing
  to do. Who waits for a rank that is late waits too;
* ``hidden``: 1 - sum(min(wait, transfer)) / sum(transfer) over the hops of all ranks, where
  ``transfer`` is a hop's time alone. 1: nobody waited. 0: all that was sent was waited for. What is
  waited beyond the transfer's own time is for a late rank and does not count. Absent where nothing
  is sent.

Per hop the same is kept among the samples, and the median repeat's spans become the trial's trace.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ringray.comm import ring as comm
from ringray.comm.replay import Recording
from ringray.instruments.hops import hops, total
from ringray.instruments.timeline import Timeline
from ringray.lab.kinds import latency
from ringray.lab.kinds.base import RankContext, ring_pass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringray.lab.trial.config import TrialConfig
    from ringray.lab.trial.measurement import RankReport


def run(config: TrialConfig, context: RankContext) -> RankReport:
    """Measure one trial on this rank; every rank of the ring calls it at the same time."""
    inputs = latency.shards(config, context)
    whole: list[Timeline] = []
    alone: list[Timeline] = []
    transfer_ms: list[float] = []
    tape = Recording()

    def ring() -> None:
        with _recording(context, whole, None if whole else tape):
            ring_pass(config, context, *inputs)

    def transfers() -> None:
        tape.prepare()
        context.barrier()
        with _recording(context, alone):
            transfer_ms.append(context.timed(tape.play) * 1e3)

    report = latency.measure(config, context, inputs, ring, transfers)
    passes = [timeline.spans() for timeline in whole[config.warmup :]]
    report.values |= {
        "compute_ms": [total(spans, "compute") * 1e3 for spans in passes],
        "transfer_ms": transfer_ms,
        "wait_ms": [total(spans, "wait") * 1e3 for spans in passes],
    }
    report.hops = hops(passes, [timeline.spans() for timeline in alone])
    report.spans = passes[_median_repeat(report.seconds, context)]
    return report


@contextmanager
def _recording(
    context: RankContext, into: list[Timeline], tape: Recording | None = None
) -> Iterator[None]:
    """Record spans, and messages on ``tape``. The timeline begins here: right after a barrier, so
    that those of all ranks begin together."""
    timeline = Timeline(context.device)
    comm.METER.timeline, comm.METER.tape = timeline, tape
    try:
        yield
    finally:
        comm.METER.timeline = comm.METER.tape = None
    into.append(timeline)


def _median_repeat(seconds: list[float], context: RankContext) -> int:
    """The repeat whose slowest rank took the median time (the lower one of two); all ranks agree
    on it."""
    mine = [round(time * 1e9) for time in seconds]
    by_rank = comm.connect(context.group).gather_integers(mine, context.device)
    slowest = [max(times) for times in zip(*by_rank, strict=True)]
    return sorted(range(len(slowest)), key=slowest.__getitem__)[(len(slowest) - 1) // 2]
