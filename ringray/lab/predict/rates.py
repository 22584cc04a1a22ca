"""Seconds of attention calls on one rank: curves over rows, by dtype, head dim and direction.

Where an entry names tables of measured calls, these give a call of its heads forward, and the
entry's curves are factors of their rates. Imports numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ringray.lab.predict.hardware import Curve, Direction, Fleet, Hardware
from ringray.lab.predict.measured import calls
from ringray.lab.predict.peak_memory import MASKED_ROWS
from ringray.lab.trial.config import TrialConfig, TrialProblem

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_] | bool

_LATENT = 192, 128  # head dims of Q and K and of V whose measured calls are those of MLA
_STEP, _LONGEST = 0.25, 21  # of curves from tables: doublings between rows, beyond the last ones

# More relative spread per doubling beyond the rows that were measured; above them rates are flat,
# and what experiments/measured/spread.py finds there is no more
_BELOW, _ABOVE = 0.5, 0.05


@dataclass(frozen=True, eq=False)
class Rates:
    """Rates of one rank in one pass, by rows of a call. ``rows``: ascending; ``full``, ``causal``,
    ``stepped``: FLOP/s of calls whose queries see all keys, those up to themselves, or more in
    steps; the last of all pairs that are computed, the others of visible pairs. ``windowed``: of
    calls whose queries see ``calls.WINDOW`` keys; None: as a triangle of as many keys. ``longest``:
    rows up to which calls were measured. ``doubt``: relative spread that is added."""

    rows: Floats
    full: Floats
    causal: Floats
    stepped: Floats
    longest: float
    windowed: Floats | None = None
    doubt: float = 0.0

    def seconds(
        self, flops: Floats, queries: Floats, keys: Floats, visible: Floats, stepped: Bools = False
    ) -> Floats:
        """Returns seconds of calls that compute ``visible`` pairs of ``queries`` x ``keys`` rows
        with so many FLOPs; 0 where nothing is visible. ``stepped``: the calls whose triangles have
        steps.

        Between a triangle (half of the pairs) and all pairs, time is interpolated. Fewer pairs than
        half are a band: a triangle that has as many keys per query.
        """
        area = np.maximum(queries * keys, 1.0)
        part = np.clip(visible / area, 0.0, 1.0)
        band = np.minimum(1.0, 2 * part)
        log_rows = np.log(np.maximum(np.sqrt(area) * np.sqrt(band), 1.0))
        square = np.clip(2 * part - 1, 0.0, 1.0)
        per_flop = square / self._at(log_rows, self.full)
        triangle = 1 / self._triangle(log_rows, self.causal)
        banded = (band < 1) & (visible > 0)
        if self.windowed is not None and np.any(banded):
            # From a window as wide as the measured ones to a triangle, as a power of the keys.
            mean, most = visible / np.maximum(queries, 1.0), keys / 2
            wider, widest = (np.maximum(n / calls.WINDOW, 1.0) for n in (mean, most))
            share = np.minimum(np.log(wider) / np.log(np.maximum(widest, 1.01)), 1.0)
            whole = self._triangle(np.log(area) / 2, self.causal)
            narrow = self._at(np.log(np.maximum(queries, 1.0)), self.windowed)
            triangle = np.where(banded, 1 / (whole**share * narrow ** (1 - share)), triangle)
        if np.any(stepped):
            wasted = _computed(np.exp(log_rows)) / self._triangle(log_rows, self.stepped)
            triangle = np.where(stepped, wasted, triangle)
        per_flop = per_flop + (1 - square) * triangle
        return np.where(visible > 0, flops * per_flop, 0.0)

    def _triangle(self, log_rows: Floats, rates: Floats) -> Floats:
        """Returns the rates of calls that are causal or stepped. What tiles on the diagonal lose on
        full ones goes on falling in proportion to rows beyond the last that are known."""
        lost = max(0.0, float(self.full[-1] / rates[-1]) - 1)
        beyond = np.minimum(1.0, np.exp(np.log(self.rows[-1]) - log_rows))
        seen: Floats = self._at(log_rows, rates) * (1 + lost) / (1 + lost * beyond)
        return seen

    def _at(self, log_rows: Floats, rates: Floats) -> Floats:
        """Interpolates in logarithms; below the first row, rates fall in proportion to rows."""
        log_known = np.log(self.rows)
        rate: Floats = np.exp(np.interp(log_rows, log_known, np.log(rates)))
        return rate * np.minimum(1.0, np.exp(log_rows - log_known[0]))

    def unknown(self, rows: int) -> float:
        """Returns the relative spread that rows add outside of the curves, and the doubt."""
        below, above = self.rows[0] / max(rows, 1), rows / self.longest
        outside = _BELOW * np.log2(max(below, 1.0)) + _ABOVE * np.log2(max(above, 1.0))
        return float(outside + self.doubt)


Kind = tuple[bool, bool]  # causal, stepped
_FULL: Kind = (False, False)
_CAUSAL: Kind = (True, False)
_STEPPED: Kind = (False, True)


def _computed(rows: Floats) -> Floats:
    """Returns pairs that are computed over those that are visible in triangles with steps: of each
    block of rows with a mask, as ``ringray_kernels.cover`` halves them, all pairs."""
    halved = np.ceil(np.log2(np.maximum(rows / MASKED_ROWS, 1.0)))
    ratio: Floats = 1 + 1 / 2**halved
    return ratio


def _joined(by_kind: Mapping[Kind, Mapping[int, float]], doubt: float) -> Rates:
    """Returns all kinds of curves over the rows of all; of a kind without a curve that of the
    nearest."""
    rows = np.array(sorted(set().union(*by_kind.values())), np.float64)

    def over_rows(*kinds: Kind) -> Floats:
        kind = next(kind for kind in kinds if kind in by_kind)
        points = dict(by_kind[kind])
        if kind == _STEPPED:
            points = {row: rate * float(_computed(np.array(row))) for row, rate in points.items()}
        measured, rates = zip(*sorted(points.items()), strict=True)
        return np.exp(np.interp(np.log(rows), np.log(measured), list(map(math.log, rates))))

    return Rates(
        rows,
        full=over_rows(_FULL, _CAUSAL, _STEPPED),
        causal=over_rows(_CAUSAL, _FULL, _STEPPED),
        stepped=over_rows(_STEPPED, _CAUSAL, _FULL),
        longest=float(rows[-1]),
        doubt=doubt,
    )


@lru_cache(maxsize=4096)
def find(
    hardware: Hardware,
    dtype: str,
    head_dim: int,
    direction: Direction,
    *,
    heads: int,
    kv_heads: int,
    value_dim: int | None = None,
) -> Rates:
    """Returns the rates of ``hardware`` for calls of so many heads of all sequences of a batch: of
    the nearest head dim that is known in ``dtype``, else those of another type scaled by the peaks;
    backward without a curve as forward."""
    used = curves(hardware, dtype, head_dim, direction)
    scale = peak(hardware, dtype) / peak(hardware, used[0].dtype)
    doubt = used[0].doubt
    if (used[0].dtype, used[0].head_dim) != (dtype, head_dim):
        doubt = max(curve.doubt for curve in hardware.attention)
    published = _joined(
        {(c.causal, c.stepped): {n: r * scale for n, r in c.rates.items()} for c in used}, doubt
    )
    if hardware.tables is None:
        return published
    return _tabled(hardware.tables, published, head_dim, value_dim or head_dim, heads, kv_heads)


def of_problem(hardware: Hardware, problem: TrialProblem, direction: Direction) -> Rates:
    """Returns the rates for calls of all heads of a problem."""
    heads = {"heads": problem.batch * problem.heads, "kv_heads": problem.batch * problem.kv_heads}
    kind = problem.dtype, problem.head_dim, direction
    return find(hardware, *kind, **heads, value_dim=problem.value_dim)


def _tabled(
    system: str, factors: Rates, head_dim: int, value_dim: int, heads: int, kv_heads: int
) -> Rates:
    """Returns the rates of measured calls times ``factors``."""
    latent = (head_dim, value_dim) == _LATENT
    causal = calls.nearest(system, "mla" if latent else "causal", head_dim)
    full = calls.nearest(system, "full", head_dim)
    band = calls.nearest(system, "causal", head_dim, calls.WINDOW)
    assert causal
    first, last = (math.log2(n) for n in (causal[1].rows[0], causal[1].rows[-1]))
    rows = np.exp2(np.append(np.arange(first, last, _STEP), np.arange(last, _LONGEST)))

    def by_rows(
        of: tuple[int, calls.Calls], pairs: Floats, factor: Floats, work: int = 1
    ) -> Floats:
        flops = 2.0 * (sum(_LATENT) if latent and of is causal else 2 * of[0]) * heads * pairs
        scale = np.exp(np.interp(np.log(rows), np.log(factors.rows), np.log(factor)))
        rates: Floats = scale * flops / of[1].time(rows, heads, kv_heads, work)
        return rates

    # Other head dims than the measured full calls, and MLA, have the chain of causal ones.
    whole, work = (full, 1) if full and (full[0], latent) == (causal[0], False) else (causal, 2)
    seen = calls.WINDOW * (rows - (calls.WINDOW - 1) / 2)
    return Rates(
        rows,
        full=by_rows(whole, rows**2, factors.full, work),
        causal=by_rows(causal, rows * (rows + 1) / 2, factors.causal),
        stepped=by_rows(causal, rows * (rows + 1) / 2, factors.stepped),
        longest=float(causal[1].rows[-1]),
        windowed=by_rows(band, seen, factors.causal) if band else None,
        doubt=factors.doubt,
    )


def curves(hardware: Hardware, dtype: str, head_dim: int, direction: Direction) -> list[Curve]:
    """Returns the curves, of one dtype and head dim, from which those of any other follow."""
    same_way = [curve for curve in hardware.attention if curve.direction == direction]

    def distance(curve: Curve) -> tuple[bool, float]:
        return curve.dtype != dtype, abs(math.log(curve.head_dim / head_dim))

    usable = same_way or hardware.attention
    best = min(usable, key=distance)
    return [c for c in usable if (c.dtype, c.head_dim) == (best.dtype, best.head_dim)]


def peak_of(on: Fleet, config: TrialConfig) -> float:
    """Returns FLOP/s of dense products of all ranks of a trial; of ranks that share cores, of as
    many as there are."""
    hardware = on.hardware
    ranks = config.ring.size if hardware.cores is None else min(config.ring.size, hardware.cores)
    return ranks * peak(hardware, config.problem.dtype)


def peak(hardware: Hardware, dtype: str) -> float:
    """Returns the peak of ``dtype``, or of the type that is nearest in width."""
    if dtype in hardware.peak:
        return hardware.peak[dtype]
    return hardware.peak.get("bfloat16") or min(hardware.peak.values())
