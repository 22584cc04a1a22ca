"""Spans of one pass and what is read off them. Plain data: no torch, so that the driver may use it.

A *hop* is named by its pass and the step at which its transfers begin: ``forward, step 0``.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Span(NamedTuple):
    """What one rank did, or what was on its way, for a while.

    ``kind``: ``compute``; ``transfer``, from when it was begun until it was waited for; ``wait``,
    nothing to do until a transfer ended. ``label``: the chunks or heads that it is about.
    ``began``, ``ended``: seconds since the timeline began. ``sent``, ``received``: bytes of the
    transfer, else 0.
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
        """How long it took."""
        return self.ended - self.began


class Hop(NamedTuple):
    """One hop, of one rank or of all; times are seconds, medians over repeats.

    ``began``: when it did first. ``compute``: computation at its step. ``transfer``: how long its
    transfers take where nothing is computed. ``wait``: how long was waited for them in the pass.
    ``sent``: bytes.
    """

    name: str
    began: float
    compute: float
    transfer: float
    wait: float
    sent: int


def total(spans: Iterable[Span], kind: str) -> float:
    """Seconds of all spans of a kind."""
    return sum(span.seconds for span in spans if span.kind == kind)


def hops(whole: Sequence[Sequence[Span]], alone: Sequence[Sequence[Span]]) -> list[Hop]:
    """The hops of one rank, from its repeats of the pass and of its transfers alone."""
    names = dict.fromkeys(span.hop for span in sorted(whole[0], key=lambda span: span.began))

    def median(repeats: Sequence[Sequence[Span]], name: str, kind: str) -> float:
        return statistics.median(
            total((span for span in spans if span.hop == name), kind) for spans in repeats
        )

    return [
        Hop(
            name,
            statistics.median(min(s.began for s in spans if s.hop == name) for spans in whole),
            median(whole, name, "compute"),
            median(alone, name, "transfer"),
            median(whole, name, "wait"),
            sum(s.sent for s in whole[0] if s.hop == name and s.kind == "transfer"),
        )
        for name in names
    ]


def hidden(ranks: Iterable[Sequence[Hop]]) -> float | None:
    """The share of the transfers' time in which their ranks did not wait for them, 0 to 1:
    1 - sum(min(wait, transfer)) / sum(transfer), over the hops of all ranks; None without any.

    What a rank waits beyond the time that the transfer takes alone, it waits for a rank that is
    late: no network, however fast, would have spared it that.
    """
    found = [hop for one in ranks for hop in one]
    transfer = sum(hop.transfer for hop in found)
    if not transfer:
        return None
    return 1 - sum(min(hop.wait, hop.transfer) for hop in found) / transfer


def merged(ranks: Iterable[Sequence[Hop]]) -> list[Hop]:
    """The hops of a ring, in the order in which they begin: the largest times, the sum of bytes."""
    by_name: dict[str, list[Hop]] = {}
    for one in ranks:
        for hop in one:
            by_name.setdefault(hop.name, []).append(hop)
    found = [
        Hop(
            name,
            min(hop.began for hop in same),
            max(hop.compute for hop in same),
            max(hop.transfer for hop in same),
            max(hop.wait for hop in same),
            sum(hop.sent for hop in same),
        )
        for name, same in by_name.items()
    ]
    return sorted(found, key=lambda hop: hop.began)
