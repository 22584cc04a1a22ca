"""Spans of one pass, and the hops that they form. Plain data, without torch: the driver uses it.

A *hop* is named by its pass and the step at which its transfers begin: ``forward, step 0``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """An interval of one rank's timeline.

    ``kind``: ``compute``; ``transfer``, from its start to the end of the wait for it; ``wait``,
    idle until a transfer ended. ``label``: its chunks or heads. ``began``, ``ended``: seconds since
    the timeline began. ``sent``, ``received``: bytes of a transfer, else 0.
    """

    kind: str
    hop: str
    label: str
    began: float
    ended: float
    sent: int = 0
    received: int = 0

    @property
    def seconds(self) -> float:
        """Returns the duration."""
        return self.ended - self.began


class Hop(NamedTuple):
    """One hop of one rank or of all; times are seconds, medians over repeats.

    ``began``: of its first span. ``compute``: computation at its step. ``transfer``: its transfers
    without computation. ``wait``: the wait for them in the pass. ``sent``: bytes.
    """

    name: str
    began: float
    compute: float
    transfer: float
    wait: float
    sent: int


def total(spans: Iterable[Span], kind: str) -> float:
    """Returns the seconds of all spans of a kind."""
    return sum(span.seconds for span in spans if span.kind == kind)


def hops(whole: Sequence[Sequence[Span]], alone: Sequence[Sequence[Span]]) -> list[Hop]:
    """Returns the hops of one rank, from repeats of the pass and of its transfers alone."""
    names = dict.fromkeys(span.hop for span in sorted(whole[0], key=lambda span: span.began))

    def median(repeats: Sequence[Sequence[Span]], name: str, kind: str) -> float:
        return statistics.median(
            total((span for span in spans if span.hop == name), kind) for spans in repeats
        )

    hops_of_rank = []
    for name in names:
        began = statistics.median(min(s.began for s in spans if s.hop == name) for spans in whole)
        compute, wait = (median(whole, name, kind) for kind in ("compute", "wait"))
        transfer = median(alone, name, "transfer")
        sent = sum(s.sent for s in whole[0] if s.hop == name and s.kind == "transfer")
        hops_of_rank.append(Hop(name, began, compute, transfer, wait, sent))
    return hops_of_rank


def hidden(ranks: Iterable[Sequence[Hop]]) -> float | None:
    """Returns the share of the transfers' time in which their ranks did not wait for them:
    1 - sum(min(wait, transfer)) / sum(transfer), over the hops of all ranks; None without any.

    A wait beyond the time that the transfer takes alone is a wait for a late rank, which a faster
    network would not shorten.
    """
    own_hops = [hop for of_rank in ranks for hop in of_rank]
    transfer = sum(hop.transfer for hop in own_hops)
    return 1 - sum(min(h.wait, h.transfer) for h in own_hops) / transfer if transfer else None


def merged(ranks: Iterable[Sequence[Hop]]) -> list[Hop]:
    """Returns the hops of a ring in order of their beginning: largest times, sums of bytes."""
    by_name: dict[str, list[Hop]] = {}
    for of_rank in ranks:
        for hop in of_rank:
            by_name.setdefault(hop.name, []).append(hop)
    ring_hops = [
        Hop(name, min(began), max(compute), max(transfer), max(wait), sum(sent))
        for name, same in by_name.items()
        for _, began, compute, transfer, wait, sent in [zip(*same, strict=True)]
    ]
    return sorted(ring_hops, key=lambda hop: hop.began)
