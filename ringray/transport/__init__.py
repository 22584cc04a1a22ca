"""Transports: how K/V reaches the other ranks. Data only; ``attention.loops`` executes it.

A transport is one pure function ``exchange(ranks, parameter) -> Exchange``: how many neighbouring
ranks first exchange heads for rows, and on which routes the chunks walk then. To add one, write
``ringray/transport/NAME.py`` with ``PARAMETER`` (the meaning of the number behind the name, or None
if it takes none), ``SEARCHED`` (how the tuner tries it) and ``exchange``, and add it to
``TRANSPORTS``; the contract suite then runs over it. Specs, plans and the ring read the same
tables; nothing here needs torch.

A transport is written as its name, or with its parameter: ``hybrid:2``, ``double-ring:4``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ringray.base.errors import unknown
from ringray.transport import (
    allgather,
    bidirectional,
    direct,
    double_ring,
    hybrid,
    ring,
    staged,
    ulysses,
)
from ringray.transport.exchange import Exchange, Searched

__all__ = ["DEALT", "DEFAULT", "TRANSPORTS", "Exchange", "Transport", "parse", "plan", "searched"]


@dataclass(frozen=True)
class Transport:
    """A registered transport.

    ``parameter``: the meaning of the number behind the name. ``searched``: how the tuner tries it.
    ``exchange(ranks, parameter)``: its exchange on a ring of ``ranks``; raises ValueError, with the
    equation, for a size that does not multiply out.
    """

    name: str
    parameter: str | None
    searched: Searched
    exchange: Callable[[int, int | None], Exchange]


TRANSPORTS: dict[str, Transport] = {
    name: Transport(name, module.PARAMETER, module.SEARCHED, module.exchange)
    for name, module in {
        "ring": ring,
        "bidirectional": bidirectional,
        "direct": direct,
        "allgather": allgather,
        "ulysses": ulysses,
        "hybrid": hybrid,
        "double-ring": double_ring,
        "staged": staged,
    }.items()
}
DEFAULT = "ring"
DEALT = "direct"  # default where documents choose their ring


class Named(NamedTuple):
    """A transport and the number that was given behind its name."""

    transport: Transport
    parameter: int | None


@lru_cache(maxsize=256)
def parse(text: str) -> Named:
    """Reads ``name`` or ``name:number``; raises ValueError with the valid names otherwise."""
    name, colon, number = text.partition(":") if isinstance(text, str) else (str(text), "", "")
    if name not in TRANSPORTS or not isinstance(text, str):
        raise ValueError(unknown("transport", text, TRANSPORTS))
    transport = TRANSPORTS[name]
    if not colon:
        return Named(transport, None)
    if transport.parameter is None:
        raise ValueError(f"transport: got {text!r}, but {name!r} takes no number")
    if not re.fullmatch(r"[1-9][0-9]{0,4}", number):
        raise ValueError(
            f"transport: got {text!r}, expected {name}:N with N the {transport.parameter}, at "
            "least 1"
        )
    return Named(transport, int(number))


@lru_cache(maxsize=1024)
def plan(text: str, ranks: int, heads: int, kv_heads: int) -> Exchange:
    """Returns the exchange that ``text`` stands for on a ring of ``ranks`` with these heads.

    Raises:
        ValueError: no such transport, or ring and heads do not multiply out; prints the equation.
    """
    named = parse(text)
    exchange = named.transport.exchange(ranks, named.parameter)
    fold = exchange.fold
    for what, count in (("query heads", heads), ("K/V heads", kv_heads)):
        if count % fold:
            raise ValueError(
                f"transport {text!r} gives each of {fold} ranks an equal share of the heads, but "
                f"{count} {what} / {fold} ranks = {count / fold:.4g}"
            )
    return exchange


def searched(ranks: int, heads: int, kv_heads: int) -> list[str]:
    """Lists the transports that the tuner tries on a ring of ``ranks`` with these heads."""
    fitting = []
    for name, transport in TRANSPORTS.items():
        divisors = [f"{name}:{n}" for n in range(2, ranks) if ranks % n == 0]
        for text in {"name": [name], "divisors": divisors, "never": []}[transport.searched]:
            with suppress(ValueError):  # it does not fit
                plan(text, ranks, heads, kv_heads)
                fitting.append(text)
    return fitting
