"""Measured times of attention calls, products and collectives by system, read when they are used.

The files beside this one are facts of github.com/ai-dynamo/aiconfigurator (Apache-2.0, commit
095f58a), packed by ``experiments/measured/pack.py``; each time there keeps the software that
measured it. Imports numpy only.

calls   seconds of attention calls between those that were measured
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent
Floats = NDArray[np.float64]


class Curves(NamedTuple):
    """Curves of one kind. ``at``: rows, m or elements, ascending; ``seconds``: at these, by the
    numbers that tell a curve apart."""

    at: Floats
    seconds: dict[tuple[int, ...], Floats]


def systems() -> list[str]:
    """Returns the names of all systems."""
    return sorted(path.stem for path in FOLDER.glob("*.curves"))


@lru_cache(maxsize=16)
def read(system: str) -> dict[str, Curves]:
    """Returns the curves of a system by kind: ``causal``, ``full``, ``mla``, ``product`` and the
    operations of NCCL."""
    kinds: dict[str, Curves] = {}
    for line in (FOLDER / f"{system}.curves").read_text(encoding="utf-8").splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "at":
            kind, *places = rest.split()
            kinds[kind] = Curves(np.array(places, np.float64), {})
        elif kind in kinds:
            numbers, times, _ = rest.split(" | ")
            seconds = np.array(times.split(), np.float64) / 1e3
            kinds[kind].seconds[tuple(map(int, numbers.split()))] = seconds
    return kinds


def between(place: float, curves: Iterable[tuple[float, Floats]]) -> Floats:
    """Returns the values at ``place`` among those of some others, linear in its logarithm; those of
    the first or last beyond them."""
    places, values = zip(*sorted(curves, key=lambda curve: curve[0]), strict=True)
    after = min(max(int(np.searchsorted(places, place)), 1), len(places) - 1)
    low, high = places[after - 1], places[after]
    share = math.log(place / low) / math.log(high / low) if after else 0.0
    share = min(max(share, 0.0), 1.0)
    near: Floats = (1 - share) * values[after - 1] + share * values[after]
    return near
