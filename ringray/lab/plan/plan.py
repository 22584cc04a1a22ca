"""From a spec to a frozen plan: every trial, what it costs, and what is pruned and why.

A plan needs no cluster and imports neither torch nor ray. Points that can never run (heads that do
not divide, a window without causal) are pruned with the field that is to blame; a spec of which no
point can run is an error.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ringray.base import provenance
from ringray.base.errors import SpecError
from ringray.lab.plan import cost_model, expand, limits, searching
from ringray.lab.plan.pruning import Reason, impossible, interpreted
from ringray.lab.trial.config import FIELDS, TrialConfig, default_config
from ringray.lab.trial.outcome import TrialRow
from ringray.traffic import geometry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.context import BaseContext

    from ringray.lab.spec.model import Spec
    from ringray.lab.trial.outcome import Outcome

_MANY_GEOMETRIES = 2000  # about a second's work: more processes pay for their start
_CHUNK = 100

# The sweep's axes, slowest first: trials that share a ring follow each other.
AXES: tuple[tuple[str, str, str], ...] = (
    ("ring", "size", "ring_size"),
    ("ring", "threads", "threads"),
    ("problem", "dtype", "dtype"),
    ("problem", "seq_len", "seq_len"),
    ("problem", "batch", "batch"),
    ("problem", "heads", "heads"),
    ("problem", "kv_heads", "kv_heads"),
    ("problem", "head_dim", "head_dim"),
    ("problem", "causal", "causal"),
    ("problem", "window", "window"),
    ("problem", "documents", "documents"),
    ("problem", "direction", "direction"),
    ("strategy", "transport", "transport"),
    ("strategy", "backward", "backward"),
    ("strategy", "backend", "backend"),
    ("strategy", "blocks", "blocks"),
    ("strategy", "partition", "partition"),
)


@dataclass(frozen=True)
class Trial:
    """One measured point of a sweep. ``key`` names it within its sweep; pruned trials never run."""

    index: int
    key: str
    kind: str
    config: TrialConfig
    predicted: cost_model.Cost | None
    pruned: Reason | None

    def point(self, described: dict[str, Any], chosen: Mapping[str, Any] | None = None) -> str:
        """Names what is measured, on what (``environment.describe()``). ``chosen``: what was taken
        where the config leaves it open."""
        config = {"kind": self.kind, **self.config.as_dict(), **(chosen or {})}
        return provenance.point_digest(config, described)


@dataclass(frozen=True)
class Plan:
    """All trials of a spec, in the order in which they run. ``device``: cpu or cuda, for which
    they were made."""

    spec: Spec
    trials: tuple[Trial, ...]
    device: str

    @property
    def digest(self) -> str:
        """Names the sweep: what is measured, not where it is logged."""
        return self.spec.digest

    @property
    def runnable(self) -> tuple[Trial, ...]:
        """Trials that are not pruned."""
        return tuple(trial for trial in self.trials if trial.pruned is None)

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """Config fields of which the sweep measures more than one value."""
        first = self.trials[0].config
        return tuple(
            name
            for name in FIELDS
            if any(getattr(trial.config, name) != getattr(first, name) for trial in self.trials)
        )


def build(spec: Spec, hardware: cost_model.Hardware | None = None, *, processes: int = 1) -> Plan:
    """Expand ``spec``; costs are predicted for ``hardware``, by default this machine's kind.

    A sweep over thousands of lengths is shared among ``processes``; they import the calling script
    as ``multiprocessing`` does, so one that asks for more than 1 needs a ``__main__`` guard.

    Raises:
        SpecError: no point of the sweep can run (names the field of the first reason), or the
            search and what is measured do not go together.
    """
    searching.check(spec)
    hardware = hardware or local_hardware(spec.ring.device)
    values = [spec.sweep(section, field) for section, field, _ in AXES]
    limits.check_sweep(spec, [(*axis[:2], given) for axis, given in zip(AXES, values, strict=True)])
    names = [name for _, _, name in AXES]
    # The strategies of one problem take turns, replica by replica: a machine drifts.
    turns = next(i for i, (section, _, _) in enumerate(AXES) if section == "strategy")
    values.insert(turns, tuple(range(spec.measure.replicas)))
    names.insert(turns, "replica")
    baseline = spec.measure.baseline
    constant: dict[str, Any] = {
        "device": spec.ring.device,
        "placement": spec.ring.placement,
        "warmup": spec.measure.warmup,
        "repeats": spec.measure.repeats,
        "seed": spec.measure.seed,
        "baseline": baseline.name if baseline else None,
        "baseline_threads": baseline.threads if baseline else None,
    }
    device = "cpu" if hardware.cores else "cuda"

    def expanded() -> Iterator[TrialConfig]:
        for point in itertools.product(*values):
            chosen: dict[str, Any] = dict(zip(names, point, strict=True))
            chosen["documents"] = getattr(chosen["documents"], "lengths", chosen["documents"])
            chosen["kv_heads"] = chosen["kv_heads"] or chosen["heads"]
            for strategy in expand.points(spec.kind, chosen, device):
                yield TrialConfig(**(chosen | strategy), **constant)

    configs = limits.check_points(spec, expanded())  # kv_heads null and its value are one
    settled = [default_config(config) for config in configs]
    reasons = [impossible(spec.kind, config) for config in settled]
    costs = _costs(spec, settled, reasons, hardware, processes)
    trials = tuple(
        Trial(index, _key(spec.kind, config), spec.kind, config, cost, reason)
        for index, (config, cost, reason) in enumerate(zip(configs, costs, reasons, strict=True))
    )
    if all(trial.pruned for trial in trials):
        reason = trials[0].pruned
        assert reason is not None
        raise SpecError(
            reason.text
            + ("" if len(trials) == 1 else f" (and no other of {len(trials)} points can run)"),
            path=spec.path,
            line=spec.line_of(reason.field),
            field=reason.field,
        )
    return Plan(spec, trials, device)


def _key(kind: str, config: TrialConfig) -> str:
    text = json.dumps([kind, config.as_dict()], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_Point = tuple[str, int, geometry.Mask, cost_model.Shape, cost_model.Hardware]


def _costs(
    spec: Spec,
    configs: list[TrialConfig],
    reasons: list[Reason | None],
    hardware: cost_model.Hardware,
    processes: int,
) -> list[cost_model.Cost | None]:
    """Predicted costs in the configs' order; the points of one geometry are worked out one after
    the other, because its tables are what takes time."""
    geometries: dict[tuple[Any, ...], list[int]] = {}
    for i, config in enumerate(configs):
        if reasons[i] is None:
            geometry_of = (config.partition, config.padded, config.ring_size, config.mask)
            geometries.setdefault(geometry_of, []).append(i)
    limits.check_work(spec, (configs[of[0]] for of in geometries.values()))
    order = list(itertools.chain.from_iterable(geometries.values()))
    points = [_point(configs[i], hardware) for i in order]
    costs: list[cost_model.Cost | None] = [None] * len(configs)
    if processes > 1 and len(geometries) >= _MANY_GEOMETRIES:
        with ProcessPoolExecutor(processes, _context()) as pool:
            found = list(pool.map(_predicted, points, chunksize=_CHUNK))
    else:
        found = list(map(_predicted, points))
    for i, cost in zip(order, found, strict=True):
        costs[i] = cost
    return costs


def _context() -> BaseContext:
    """Forked processes start at once, but only where no library's threads are left behind."""
    forks = sys.platform == "linux" and not {"torch", "ray"} & sys.modules.keys()
    return multiprocessing.get_context("fork" if forks else "spawn")


def _point(c: TrialConfig, hardware: cost_model.Hardware) -> _Point:
    shape = cost_model.Shape(
        c.ring_size,
        c.threads,
        c.batch,
        c.heads,
        c.kv_heads,
        c.head_dim,
        c.dtype,
        c.has_backward,
        c.transport,
        c.backward,
    )
    slow = hardware.cores is not None and interpreted(c, "cpu")
    rates = cost_model.interpreter(hardware) if slow else hardware
    return c.partition, c.padded, c.mask, shape, rates


def _predicted(point: _Point) -> cost_model.Cost:
    return cost_model.predict(*point)


def local_hardware(device: str) -> cost_model.Hardware:
    """What this machine would run ``device`` on, for predictions."""
    if device == "cuda" or (device == "auto" and shutil.which("nvidia-smi")):
        return cost_model.CUDA
    return cost_model.cpu(os.cpu_count() or 1)


def cost_dict(trial: Trial) -> dict[str, Any]:
    """The predicted cost as plain data; empty for a pruned trial."""
    return dict(trial.predicted._asdict()) if trial.predicted else {}


def trial_dict(trial: Trial) -> dict[str, Any]:
    """A trial as plain data, for ``ringray plan --json``."""
    return {
        "index": trial.index,
        "key": trial.key,
        "kind": trial.kind,
        "config": trial.config.as_dict(),
        "predicted": cost_dict(trial),
        "pruned": str(trial.pruned) if trial.pruned else None,
    }


def trial_row(trial: Trial, outcome: Outcome) -> TrialRow:
    """A planned trial and what came of it, as a record."""
    return TrialRow(
        trial.key, trial.index, trial.config.as_dict(), cost_dict(trial), outcome.status,
        outcome.reason, dict(outcome.metrics), dict(outcome.samples), outcome.point,
        outcome.attempts, outcome.started, outcome.ended, outcome.environment,
    )  # fmt: skip
