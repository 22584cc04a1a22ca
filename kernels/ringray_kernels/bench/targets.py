"""Targets of the kernels on an H200 (bf16, head dim 128), compared with the results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ringray_kernels.bench.problems import DIRECTIONS, Direction, MaskName, Point, VirtualPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ringray_kernels.bench.measure import Record

_K = 1024


def is_ours(contender: str) -> bool:
    return contender.partition("-")[0] == "ringray"


class Results:
    """Records by case and contender. ``best``: ringray is the fastest deterministic kernel of ours
    in the dtype of the inputs, not the default."""

    def __init__(self, records: Iterable[Record], *, best: bool = False) -> None:
        self.best = best
        self.records = {(one.case, one.contender): one for one in records}

    def tflops(self, case: str, contender: str = "ringray") -> float | None:
        """Returns measured TFLOP/s of a contender or its tuned variant, or None."""
        names = {contender, f"{contender}-tuned"}
        if self.best and contender == "ringray":
            others = {"ringray-atomic", "ringray-fp8"}
            names = {name for _, name in self.records if is_ours(name)} - others
        found = [self.records.get((case, name)) for name in names]
        return max((one.tflops or 0 for one in found if one and one.status == "ok"), default=None)

    def more(self, case: str, name: str) -> float | None:
        """Returns one of ringray's further figures, or None."""
        found = self.records.get((case, "ringray"))
        return None if found is None else found.more.get(name)


@dataclass(frozen=True)
class SpeedTarget:
    """A bound on a figure. ``measured`` returns the figure, or None if it is missing; the bound is
    ``at_least`` or ``at_most``. ``case``: that of a rate."""

    name: str
    measured: Callable[[Results], float | None]
    at_least: float | None = None
    at_most: float | None = None
    case: str = ""

    def line(self, results: Results) -> str:
        """Returns the line with the verdict and the margin: of our defaults, and of the best of
        ours where that is another figure."""
        bound = self.at_least if self.at_least is not None else self.at_most
        assert bound is not None
        sign = "≥" if self.at_least is not None else "≤"
        line = f"{self.name:58} {sign} {bound:<7.4g} "
        value = self.measured(results)
        best = self.measured(Results(results.records.values(), best=True))
        line += "not measured" if value is None else self._verdict(value, bound)
        return (
            line if best in (value, None) else f"{line}; best of ours {self._verdict(best, bound)}"
        )

    def _verdict(self, value: float, bound: float) -> str:
        margin = (value / bound - 1) * (1 if self.at_least is not None else -1)
        return f"{value:<8.4g} {'met' if margin >= 0 else 'MISSED'} by {abs(margin):.1%}"


def _rate(name: str, point: Point, at_least: float, contender: str = "ringray") -> SpeedTarget:
    return SpeedTarget(
        name, lambda results: results.tflops(point.name, contender), at_least, case=point.name
    )


def _against(name: str, point: Point, other: str, at_least: float) -> SpeedTarget:
    def ratio(results: Results) -> float | None:
        ours, theirs = results.tflops(point.name), results.tflops(point.name, other)
        return None if ours is None or theirs is None else ours / theirs

    return SpeedTarget(name, ratio, at_least)


def _share(point: Point) -> SpeedTarget:
    """Bounds the time of a sparse mask over causal's, over the ratio of their FLOPs."""
    causal = replace(point, mask="causal", window=None)

    def ratio(results: Results) -> float | None:
        sparse, dense = results.tflops(point.name), results.tflops(causal.name)
        return None if sparse is None or dense is None else dense / sparse

    return SpeedTarget(f"{point.name}: cost over its FLOP share", ratio, at_most=1.1)


def _virtual(direction: Direction) -> Iterator[SpeedTarget]:
    point = VirtualPoint("zigzag", 8, 128 * _K)
    case = point.name(direction)
    yield SpeedTarget(f"{case}: sum", lambda r: r.more(case, "overhead"), at_most=1.06)
    yield SpeedTarget(f"{case}: slowest", lambda r: r.more(case, "critical_path"), at_most=1.05 / 8)


def targets() -> list[SpeedTarget]:
    """Returns all targets; rates in TFLOP/s."""

    def at_16k(mask: MaskName, direction: Direction) -> Point:
        return Point(mask, 16 * _K, direction=direction)

    full, causal = at_16k("full", "forward"), at_16k("causal", "forward")
    back = at_16k("causal", "backward")
    listed = [
        _rate("forward full, TFLOP/s", full, 640),
        _rate("forward causal, TFLOP/s", causal, 600),
    ]
    for point in (full, causal):
        listed += [
            _against(f"forward {point.mask} over cuDNN", point, "sdpa-cudnn", 1.0),
            _against(f"forward {point.mask} over FlexAttention", point, "flex", 1.5),
        ]
    listed += [
        _rate("backward full, deterministic, TFLOP/s", at_16k("full", "backward"), 400),
        _rate("backward causal, deterministic, TFLOP/s", back, 400),
        _against("backward causal over FlexAttention", back, "flex", 1.3),
        _rate("backward causal, fused atomic, TFLOP/s", back, 500, "ringray-atomic"),
    ]
    for direction in DIRECTIONS:
        for length, window in ((16 * _K, 2 * _K), (64 * _K, 4 * _K)):
            listed += [
                _share(Point("window", length, direction=direction, window=window)),
                _share(Point("documents", length, direction=direction)),
            ]
    for direction in DIRECTIONS:
        listed += _virtual(direction)
    return listed


@cache
def _rated() -> frozenset[str]:
    return frozenset(one.case for one in targets())


def rated(point: Point) -> bool:
    """Returns whether a rate of ``point`` is a target."""
    return point.name in _rated()


def summary(records: Iterable[Record], device_name: str) -> list[str]:
    """Returns a heading and one line for each target."""
    results = Results(records)
    note = "" if "H200" in device_name else f"; this is {device_name}"
    return [f"targets (for an H200{note})", *(target.line(results) for target in targets())]
