"""Overlap: how much communication is hidden behind computation.

Each repeat runs the pass of ``latency`` with a timeline, then its messages alone: the recording of
the first pass, replayed without computation. Both are measured close together, because a machine's
speed drifts. Each metric is the largest of the ranks' medians over repeats:

* ``compute_ms``: attention alone, the sum of its spans in the pass;
* ``transfer_ms``: all messages alone, from a barrier until the last has arrived;
* ``wait_ms``: the sum of all waits in the pass; on CUDA the time in which the device was idle.
  Waits for a late rank are included;
* ``hidden``: 1 - sum(min(wait, transfer)) / sum(transfer) over the hops of all ranks, where
  ``transfer`` is a hop's time alone. 1: no rank waited. 0: ranks waited for every transfer in full.
  A wait beyond the transfer's own time is for a late rank and does not count. Absent where nothing
  is sent.

The samples hold the same per hop, and the median repeat's spans become the trial's trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringray.comm.batch import METER
from ringray.comm.replay import Recording
from ringray.comm.ring import connect
from ringray.instruments.hops import hops, total
from ringray.instruments.timeline import Timeline
from ringray.lab.kinds import latency
from ringray.lab.kinds.base import RankContext, ring_pass
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.measurement import RankReport


def run(config: TrialConfig, context: RankContext) -> RankReport:
    """Measures one trial on this rank; every rank of the ring calls it at the same time."""
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
    passes = [timeline.spans() for timeline in whole[config.measure.warmup :]]
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
    """Records spans, and messages on ``tape``. The timeline begins here, right after a barrier, so
    that the timelines of all ranks begin together."""
    timeline = Timeline(context.device)
    METER.timeline, METER.tape = timeline, tape
    try:
        yield
    finally:
        METER.timeline = METER.tape = None
    into.append(timeline)


def _median_repeat(seconds: list[float], context: RankContext) -> int:
    """Returns the repeat whose slowest rank took the median time (the lower of two), the same on
    all ranks."""
    mine = [round(time * 1e9) for time in seconds]
    by_rank = connect(context.group).gather_integers(mine, "hops")
    slowest = [max(times) for times in zip(*by_rank, strict=True)]
    return sorted(range(len(slowest)), key=slowest.__getitem__)[(len(slowest) - 1) // 2]
