"""Fits an entry of hardware to trials that were measured on it: rates of calls, links, spread.

The time of a trial is its computation by each curve and its exposed communication, within a node
or between nodes as it ran, each times a factor. Least squares, with less weight for outliers
(Huber, 1964), find the factors near 1 that explain the trials.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.base.errors import UserError
from ringray.lab.kinds import KINDS
from ringray.lab.predict import calibration, cost_model, rates
from ringray.lab.predict.hardware import Curve, Direction, Fleet, Hardware, Link
from ringray.lab.store.store import Store, default_path
from ringray.lab.trial.config import TrialConfig

NEWEST = 128  # trials that are looked at
_SWEEPS = 32  # the newest, whose trials are taken
LEAST, _MOST_TRIALS = 8, 32  # trials that are fitted to
_ROUNDS = 3  # of factors: with them, the part of the communication that is hidden changes
_OUTLIER = 0.1  # relative error beyond which a trial counts less
_TRUST = 0.5  # weight of a factor's own logarithm beside the errors of trials
_LARGEST = 16.0  # factor, either way
_INTERVAL = 0.8

# Dtype, head dim and direction of a curve; or the links within a node or between nodes.
Part = tuple[str, int, Direction] | Literal["inner", "outer"]


class MeasuredTrial(NamedTuple):
    """A measured trial: its median time in seconds, and the environment of its record."""

    config: TrialConfig
    seconds: float
    environment: Mapping[str, Any]


def past_trials(named: str | None, but: str = "") -> Iterator[MeasuredTrial]:
    """Yields trials of the named store or the default one, newest sweeps first, except those of one
    sweep; none, with a warning, if it cannot be read."""
    path = Path(named) if named else default_path()
    if not path.exists():
        return
    try:
        with Store(path, readonly=True) as store:
            for sweep in islice(store.sweeps(), _SWEEPS):
                kind = KINDS.get(sweep.kind)
                if sweep.digest == but or kind is None or kind.independent_ranks:
                    continue
                for row in store.newest(sweep.digest, NEWEST):
                    if "prediction_ratio" not in row.numbers:
                        continue
                    seconds, environment = row.metrics["median_ms"] / 1e3, row.environment
                    with suppress(TypeError):  # of another version, with other fields
                        config = TrialConfig.from_dict(row.config)
                        yield MeasuredTrial(config, seconds, environment or sweep.environment)
    except UserError as error:
        print(f"ringray: warning: predictions without its trials: {error}", file=sys.stderr)


def fitted(on: Fleet, trials: Iterable[MeasuredTrial]) -> Fleet:
    """Returns ``on`` with the rates, links and spread of ``trials``, the newest first: of some of
    those on such hardware by this code. It is ``on`` where they are few or explain nothing."""
    covers = calibration.covering(on)
    there = (
        trial
        for trial in trials
        if _comparable(trial.config) and covers(trial.environment, trial.config.ring.device)
    )
    seen = list(islice(there, NEWEST))
    if len(seen) < LEAST:
        return on
    seen = random.Random(0).sample(seen, min(len(seen), _MOST_TRIALS))
    even = replace(on, noise=None)  # as the trials ran
    now, before = even, _errors(even, seen)
    for _ in range(_ROUNDS):
        now = replace(even, hardware=_scaled(now, _factors(now, seen)))
    after = _errors(now, seen)
    if statistics.median(after) >= statistics.median(before):
        return on
    spread = min(float(np.expm1(np.quantile(after, _INTERVAL))), 2.0)
    if on.hardware.measured is not None:
        spread = max(spread, on.hardware.spread)
    # Of curves that no trial used nothing is known that was not before.
    used = {part for trial in seen for part in _parts(trial.config, _where(trial, on))}
    doubt = max(0.0, on.hardware.spread - spread)
    curves = tuple(
        curve.model_copy(update={"doubt": 0.0 if _part(curve) in used else doubt})
        for curve in now.hardware.attention
    )
    update = {"spread": spread, "fitted": len(seen), "attention": curves}
    return replace(on, hardware=now.hardware.model_copy(update=update))


def _comparable(config: TrialConfig) -> bool:
    """Tells whether a trial says something of rates: decoding and training have models of their
    own, the choices of ``auto`` are not known, and other backends, blocks and scores have other
    rates."""
    strategy = config.strategy
    settled = "auto" not in (strategy.partition, strategy.transport)
    usual = strategy.backend == "auto" and strategy.blocks is None and config.problem.plain
    return settled and usual and config.problem.new_tokens is None and config.training is None


def _where(trial: MeasuredTrial, on: Fleet) -> Fleet:
    """Returns the part of ``on`` on which a trial ran: as many nodes as its record has, by default
    as few as hold its ring."""
    ring, hardware = trial.config.ring.size, on.hardware
    least = 1 if on.shares_cores else -(-ring // hardware.ranks_per_node)
    nodes = (trial.environment.get("ring") or {}).get("nodes", least)
    return replace(on, nodes=nodes, per_node=-(-ring // nodes))


def _errors(on: Fleet, seen: Sequence[MeasuredTrial]) -> list[float]:
    """Returns the logarithm of each error, which has no sign."""
    times = (cost_model.predict(trial.config, _where(trial, on)).time_ms / 1e3 for trial in seen)
    pairs = zip(seen, times, strict=True)
    return [abs(float(np.log(trial.seconds / time))) for trial, time in pairs]


def _factors(on: Fleet, seen: Sequence[MeasuredTrial]) -> dict[Part, float]:
    """Returns the factors of the seconds of each part."""
    from scipy.optimize import least_squares  # takes a while to import

    parts = [_parts(trial.config, _where(trial, on)) for trial in seen]
    names = sorted({name for some in parts for name in some}, key=str)
    seconds = np.array([[some.get(name, 0.0) for name in names] for some in parts])
    measured = np.log([trial.seconds for trial in seen])

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.append(np.log(seconds @ np.exp(logs)) - measured, _TRUST * logs)

    solved = least_squares(errors, np.zeros(len(names)), loss="huber", f_scale=_OUTLIER)
    factors = np.clip(np.exp(solved.x), 1 / _LARGEST, _LARGEST)
    return dict(zip(names, factors.tolist(), strict=True))


def _parts(config: TrialConfig, on: Fleet) -> dict[Part, float]:
    """Returns the predicted seconds of each part of a trial."""
    seconds: dict[Part, float] = {}
    whole = cost_model.predict(config, on)
    computing = whole.time_ms - whole.exposed_ms
    seconds["outer" if whole.outer_bytes else "inner"] = whole.exposed_ms / 1e3
    if config.problem.has_backward:
        forward = cost_model.predict(config.changed(direction="forward"), on)
        back = max(0.0, computing - (forward.time_ms - forward.exposed_ms))
        seconds[_curve(config, on, "backward")] = back / 1e3
        computing -= back
    part = _curve(config, on, "forward")
    seconds[part] = seconds.get(part, 0.0) + computing / 1e3
    return seconds


def _curve(config: TrialConfig, on: Fleet, direction: Direction) -> Part:
    problem = config.problem
    return _part(rates.curves(on.hardware, problem.dtype, problem.head_dim, direction)[0])


def _part(curve: Curve) -> Part:
    return curve.dtype, curve.head_dim, curve.direction


def _scaled(on: Fleet, factors: Mapping[Part, float]) -> Hardware:
    """Returns the entry whose parts take so many times as long; curves that no trial used take the
    median of the others of their direction. Links between nodes that were measured stay."""
    hardware, curves = on.hardware, []
    for curve in hardware.attention:
        same_way = [x for part, x in factors.items() if part[2:] == (curve.direction,)]
        usual = statistics.median(same_way) if same_way else 1.0
        factor = factors.get(_part(curve), usual)
        rate = {rows: rate / factor for rows, rate in curve.rates.items()}
        curves.append(curve.model_copy(update={"rates": rate}))

    def slower(was: Link, by: float) -> Link:
        # As computed: it may lie beyond the bounds of what is written in a file.
        bandwidth, latency = was.bandwidth / by, was.latency * by
        return Link.model_construct(bandwidth=bandwidth, latency=latency, ranks=was.ranks)

    inner = slower(hardware.inner, factors.get("inner", 1.0))
    outer = slower(hardware.outer, 1.0 if on.linked else factors.get("outer", 1.0))
    changed = {"attention": tuple(curves), "inner": inner, "outer": outer}
    if "inner" in factors:  # the link that was fitted says it from now on
        changed["collectives"] = None
    return hardware.model_copy(update=changed)
