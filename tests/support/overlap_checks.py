"""Checks of every rank of a real ring: communication runs while the rank computes.

The order of events decides, not their durations: a transfer begins before the computation of its
step, and the rank waits for it only after that computation has ended.
"""

from __future__ import annotations

import torch

from ringray import transport
from ringray.comm.ring import METER
from ringray.instruments.hops import Span
from ringray.instruments.timeline import Timeline
from ringray.traffic import walk
from tests.support.ranks import Case

EXCHANGES = ("heads to rows", "rows to heads")  # hops that have nothing to hide behind


def transfers_run_beside_computation(rank: int, size: int) -> None:
    """Every transport and way back: no step waits for its transfers before it has computed."""
    heads = 2 * size
    for name in transport.TRANSPORTS:
        several = name in ("ring", "bidirectional", "direct")
        for backward in walk.BACKWARDS if several else ("auto",):
            case = Case(
                "zigzag", seq_len=8 * size, causal=False, transport=name, backward=backward,
                heads=heads, kv_heads=heads,
            )  # fmt: skip
            exempt = set[str]()
            if name == "allgather":  # one head at a time: the first to come, the last to go
                exempt = {"forward, start", "backward, start", f"backward, step {heads}"}
            hidden = beside_computation(recorded(case), exempt, (name, backward, rank))
            if name == "ring":
                assert {f"forward, step {at}" for at in range(size - 1)} <= hidden
                assert sum(hop.startswith("backward") for hop in hidden) >= size - 1


def recorded(case: Case) -> list[Span]:
    """The spans of one forward and backward pass."""
    METER.timeline = Timeline(torch.device("cpu"))
    try:
        case.run()
        return METER.timeline.spans()
    finally:
        METER.timeline = None


def beside_computation(spans: list[Span], exempt: set[str], case: object) -> set[str]:
    """Checks the order of events and returns the hops whose transfers run beside computation."""
    hidden = set[str]()
    for transfer in spans:
        if transfer.kind != "transfer" or transfer.hop.endswith(EXCHANGES):
            continue
        about = transfer.hop, transfer.label
        computed = [s for s in spans if s.kind == "compute" and s.hop == transfer.hop]
        (wait,) = (s for s in spans if s.kind == "wait" and (s.hop, s.label) == about)
        if not computed:
            assert transfer.hop in exempt, (case, about, "nothing to hide behind")
            continue
        assert transfer.began <= min(s.began for s in computed), (case, about, "begins too late")
        assert wait.began >= max(s.ended for s in computed), (case, about, "is waited for too soon")
        hidden.add(transfer.hop)
    return hidden
