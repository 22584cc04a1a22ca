"""A frozen plan of a spec: its trials, their predicted costs, the pruned ones with a reason.

A plan needs no cluster and imports neither torch nor ray. Points that can never run (heads that do
not divide, a window without causal) are pruned with the field that is wrong; a spec without a point
that can run is an error.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from ringray.base import provenance
from ringray.base.errors import UserError, reason_of
from ringray.base.units import duration
from ringray.lab.kinds import TrialKind
from ringray.lab.kinds.baselines import BASELINES
from ringray.lab.plan import forecast, limits
from ringray.lab.plan.expand import expand
from ringray.lab.plan.pruning import Reason, impossible, interpreted
from ringray.lab.plan.trial import Trial
from ringray.lab.predict import calibration, cost_model, transformer
from ringray.lab.predict.fitting import MeasuredTrial, fitted
from ringray.lab.predict.hardware import LOCAL, Fleet, cpu, gpus, interpreter, parse_fleet
from ringray.lab.specs.model import Spec
from ringray.lab.specs.sections import LimitsSection
from ringray.lab.trial.config import FIELDS, TrialConfig, default_config
from ringray.lab.trial.outcome import NOT_REQUESTED, NOT_TRIED, TrialRow
from ringray.lab.trial.training import examination

# The deadline of a trial. The factor, over its predicted time, allows for a wrong prediction, the
# floor, in seconds, for imports, compilers and a busy machine, which no plan knows.
DEADLINE_FLOOR_S = 60.0
_DEADLINE_FACTOR = 50.0
# The default of ``limits.trial_timeout``: at least so many seconds, and a factor over the predicted
# time of the longest trial.
TIMEOUT_S, _TIMEOUT_FACTOR, _TIMEOUT_MOST_S = 120.0, 10.0, 86400.0
_MANY = 500  # points: about a second of work, which pays for the start of more processes
_CHUNK = 64  # points that a process takes at a time


@dataclass(frozen=True)
class Plan:
    """All trials of a spec, in running order. ``spec``: with a ``limits.trial_timeout``;
    ``device``: the planned one, cpu or cuda; ``everything``: no point is pruned by its prediction;
    ``tight``: a warning of points that may not fit, or ""; ``on``: the hardware of its predictions;
    ``named``: it was asked for by name."""

    spec: Spec
    trials: tuple[Trial, ...]
    device: str
    on: Fleet
    named: bool = False
    everything: bool = False
    tight: str = ""

    @property
    def digest(self) -> str:
        """Returns the digest of the sweep: of what is measured, not where it is logged."""
        return self.spec.digest

    @property
    def runnable(self) -> tuple[Trial, ...]:
        """Returns the trials that are not pruned."""
        return tuple(trial for trial in self.trials if trial.pruned is None)

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """Returns the config fields with more than one value in the sweep."""
        configs = [trial.config.flat() for trial in self.trials]
        return tuple(name for name in FIELDS if any(c[name] != configs[0][name] for c in configs))


def build(
    spec: Spec,
    on: Fleet | None = None,
    *,
    processes: int = 1,
    everything: bool = False,
    machine: int | None = None,
    seen: Iterable[MeasuredTrial] = (),
) -> Plan:
    """Plans ``spec``; predicts its costs on ``on``, by default its cluster or this machine.

    ``everything``: prunes only points that can never run, none by its prediction. ``machine``:
    memory in bytes of the one that measures, whatever the spec's cluster; None if another does.
    ``seen``: measured trials, the newest first, to which predictions are fitted.

    A sweep over thousands of lengths is shared among ``processes``; they import the calling script
    as ``multiprocessing`` does, so one that asks for more than 1 needs a ``__main__`` guard.

    Raises:
        SpecError: no point of the sweep can run (names the field of the first reason), the sweep is
            too large, or its search does not fit what its trials measure.
    """
    limits.check_search(spec)
    limits.check_sections(spec)
    if machine is not None:
        limits.check_corpus(spec)
    named = _cluster(spec, used=on is None and machine is None)
    asked = on or (named if machine is None else None)
    on = fitted(asked or local_fleet(spec.ring.device), seen)
    device = "cpu" if on.shares_cores else "cuda"
    host = forecast.host(asked, machine if device == "cpu" else None)
    configs = expand(spec, device)
    settled = [default_config(config) for config in configs]
    reasons = [impossible(spec.trial_kind, config) or _too_few(asked, config) for config in settled]
    _check_some(spec, reasons)
    costs = _costs(spec, settled, reasons, partial(_predict, on), processes)
    tight = ""
    if not everything:
        reasons, tight = forecast.too_large(spec, settled, costs, reasons, host)
        _check_some(spec, reasons, "; --all plans them all the same")
    trials = tuple(
        Trial(
            index,
            _key(spec.kind, config),
            spec.trial_kind,
            config,
            cost,
            reason,
            _measuring_s(spec.trial_kind, config, cost, on) if cost and not reason else 0.0,
        )
        for index, (config, cost, reason) in enumerate(zip(configs, costs, reasons, strict=True))
    )
    there = asked is not None or machine is not None  # else the hardware is a guess
    if there and on.hardware.measured and not everything:
        trials = forecast.without_beaten(spec, trials, on.hardware.cores)
    if spec.limits.trial_timeout is None:
        longest = _TIMEOUT_FACTOR * max(trial.measuring_s for trial in trials)
        limit = {"trial_timeout": min(max(TIMEOUT_S, longest), _TIMEOUT_MOST_S)}
        limits_with_default = spec.limits.model_copy(update=limit)
        limits_with_default.model_fields_set.discard("trial_timeout")  # the user wrote none
        spec = spec.model_copy(update={"limits": limits_with_default})
    return Plan(spec, trials, device, on, asked is not None, everything, tight)


def _cluster(spec: Spec, *, used: bool) -> Fleet | None:
    """Returns the fleet of the spec's cluster, if it names one; one that is not ``used`` needs no
    calibration."""
    if spec.cluster is None or (not used and spec.cluster.partition(":")[0] == LOCAL):
        return None
    try:
        return calibration.fleet(spec.cluster)
    except UserError as error:
        raise spec.error("cluster", str(error)) from None


def _too_few(on: Fleet | None, config: TrialConfig) -> Reason | None:
    """Prunes rings that are larger than the fleet."""
    if on is None or config.ring.size <= on.ranks:
        return None
    text = f"got {config.ring.size}, but {on} has {on.ranks:,} ranks"
    return Reason("ring.size", text)


def _check_some(spec: Spec, reasons: list[Reason | None], way_out: str = "") -> None:
    """Raises SpecError if no point is left, about the field of the first reason."""
    if (first := reasons[0]) and all(reasons):
        others = f" (and no other of {len(reasons)} points can run)" if len(reasons) > 1 else ""
        raise spec.error(first.field, first.text + others + way_out)


def _measuring_s(kind: TrialKind, config: TrialConfig, cost: cost_model.Cost, on: Fleet) -> float:
    measure = config.measure
    once = cost.time_ms / 1e3
    if measure.baseline and BASELINES[measure.baseline].on_ring:
        once *= 2
    elif passes := kind.oracle_passes or bool(measure.baseline):
        once += passes * cost_model.alone_s(config, on)
    return once * (measure.warmup + measure.repeats + examination(config))


def _key(kind: str, config: TrialConfig) -> str:
    text = json.dumps([kind, config.as_dict()], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _costs(
    spec: Spec,
    configs: list[TrialConfig],
    reasons: list[Reason | None],
    predict: Callable[[TrialConfig], cost_model.Cost],
    processes: int,
) -> list[cost_model.Cost | None]:
    """Returns the predicted costs in the order of ``configs``, None for pruned points."""
    points: dict[object, list[int]] = {}
    for i, (config, reason) in enumerate(zip(configs, reasons, strict=True)):
        if reason is None:
            strategy, problem = config.strategy, config.problem
            geometry = strategy.partition, config.padded, config.ring.size, problem.mask
            points.setdefault(geometry, []).append(i)
    limits.check_work(spec, (configs[alike[0]] for alike in points.values()))
    # Points of one geometry follow each other, because only a few geometries are cached.
    order = [i for alike in points.values() for i in alike]
    in_order = [configs[i] for i in order]
    if processes > 1 and len(order) >= _MANY:
        # Forked processes start at once, but copy the locks of other libraries' threads.
        forks = sys.platform == "linux" and not {"torch", "ray"} & sys.modules.keys()
        context = multiprocessing.get_context("fork" if forks else "spawn")
        with ProcessPoolExecutor(processes, context) as pool:
            predicted = list(pool.map(predict, in_order, chunksize=_CHUNK))
    else:
        predicted = list(map(predict, in_order))
    costs = dict(zip(order, predicted, strict=True))
    return [costs.get(i) for i in range(len(configs))]


def _predict(on: Fleet, config: TrialConfig) -> cost_model.Cost:
    if config.training is not None:
        return transformer.predict(config, on)
    slow = on.shares_cores and interpreted(config, "cpu")
    return cost_model.predict(config, interpreter(on) if slow else on)


class Deadline(NamedTuple):
    """The longest time from the dispatch of a trial to its end, and the limit that it follows
    from, in words."""

    seconds: float
    limit: str


def deadline(trial: Trial, section: LimitsSection) -> Deadline:
    """Returns the deadline of ``trial``, which is the user's limit if there is one; ``section`` has
    the limits of the plan."""
    timeout = section.trial_timeout or TIMEOUT_S
    if section.trial_timeout is not None and "trial_timeout" in section.model_fields_set:
        return Deadline(timeout, f"limits.trial_timeout: {duration(timeout)}")
    default = f"limits.trial_timeout is {duration(timeout)} by default"
    if trial.predicted is None or trial.kind.independent_ranks:  # compilers take unknown times
        return Deadline(timeout, default)
    longest = max(DEADLINE_FLOOR_S, _DEADLINE_FACTOR * trial.measuring_s)
    if longest >= timeout:
        return Deadline(timeout, default)
    guess = f"{_DEADLINE_FACTOR:g} × the predicted {duration(trial.measuring_s)}, at least"
    guess += f" {DEADLINE_FLOOR_S:g} s; limits.trial_timeout sets another"
    return Deadline(longest, guess)


def restored(spec: Spec, rows: Iterable[TrialRow]) -> Plan:
    """Returns the plan of a sweep as its rows in a store have it, whoever planned it; points that
    ended without a measurement only while it ran are not pruned.

    Raises:
        UserError: another version of ringray wrote the rows.
    """
    on, trials = local_fleet(spec.ring.device), []
    try:
        for row in rows:
            config = TrialConfig.from_dict(row.config)
            cost = cost_model.Cost(**row.predicted) if row.predicted else None
            field, _, why = (row.reason or "").partition(": ")
            late = field in (NOT_REQUESTED.partition(": ")[0], NOT_TRIED.partition(": ")[0])
            pruned = Reason(field, why) if row.status == "pruned" and not late else None
            takes = _measuring_s(spec.trial_kind, config, cost, on) if cost and not pruned else 0.0
            trials.append(Trial(row.index, row.key, spec.trial_kind, config, cost, pruned, takes))
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"the trials of sweep {spec.name} are of another version of ringray "
            f"({reason_of(error)}), which can show them"
        ) from None
    return Plan(spec, tuple(trials), "cpu" if on.shares_cores else "cuda", on)


def local_fleet(device: str) -> Fleet:
    """Returns the hardware of this machine for ``device``, as it was measured or by the table."""
    cuda = device == "cuda" or (device == "auto" and bool(shutil.which("nvidia-smi")))
    hardware, _ = calibration.find("cuda" if cuda else "cpu")
    if hardware is not None:
        return parse_fleet(LOCAL, hardware)
    if cuda:
        return gpus(*provenance.hardware()["gpus"][:1])
    return cpu(provenance.cores(), **provenance.bf16_products())
