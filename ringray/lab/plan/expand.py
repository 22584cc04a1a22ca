"""The search space of a spec: each combination of swept values, and what a tuning kind adds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringray import transport as transports
from ringray.base.errors import UserError
from ringray.lab.kinds import TrialKind
from ringray.lab.kinds.baselines import BASELINES
from ringray.lab.plan import kernel_cuts, limits
from ringray.lab.specs.domain_fields import DrawnDocuments, Window
from ringray.lab.specs.model import Spec
from ringray.lab.specs.sections import ProblemSection
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.lengths import drawn
from ringray.models import sizes
from ringray.partition import NAMES, PARTITIONS
from ringray.traffic import walk
from ringray.training.recipe import POOLED, check_layers
from ringray.tuning import table as tuned

_LENGTHS = 64  # that those of a reach are multiples of
STRATEGY = ("transport", "backward", "backend", "blocks", "partition")
_SWEPT = {
    "ring": ("size", "threads", "order"),
    "problem": sorted(ProblemSection.model_fields, key=lambda name: name != "dtype"),
    "strategy": STRATEGY,
}
# Section, field and config field, slowest first: trials that share a ring follow each other.
AXES = tuple(
    (section, field, "ring_size" if field == "size" else field)
    for section, fields in _SWEPT.items()
    for field in fields
)


# Of ``training``, swept.
_TRAINED = ("model", "dp", "tp", "pp", "pool", "scores", "mlp_rows", "kept", "offload")
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")


def axes_of(spec: Spec) -> tuple[tuple[str, str, str], ...]:
    """Returns the axes of a spec, slowest first."""
    if not spec.trial_kind.trains:
        return AXES
    return tuple(("training", name, name) for name in _TRAINED) + AXES


def expand(spec: Spec, device: str) -> list[TrialConfig]:
    """Returns the points of ``spec`` on ``device`` (cpu or cuda), each once, in running order.

    Raises:
        SpecError: too many points or documents.
    """
    limits.check_sweep(spec, [(*axis[:2], spec.sweep(*axis[:2])) for axis in axes_of(spec)])
    configs = limits.check_points(spec, _points(spec, device))
    if spec.training.checkpoints is not None and len(configs) > 1:
        text = f"one folder for {len(configs):,} points, expected a spec of one point"
        raise spec.error("training.checkpoints", text)
    return configs


def _points(spec: Spec, device: str) -> Iterator[TrialConfig]:
    axes: dict[str, Sequence[Any]] = {}
    for section, field, name in axes_of(spec):
        if section == "strategy":
            # The strategies of one problem take turns, replica by replica: a machine drifts.
            axes.setdefault("replica", range(spec.measure.replicas))
        axes[name] = spec.sweep(section, field)
    if spec.trial_kind.bisects_length:
        axes["seq_len"] = _ladder(*limits.check_reach(spec))
    baseline = spec.measure.baseline
    alone = baseline is not None and not BASELINES[baseline.name].on_ring
    constant: dict[str, Any] = {
        "device": spec.ring.device,
        "placement": spec.ring.placement,
        "warmup": spec.measure.warmup,
        "repeats": spec.measure.repeats,
        "seed": spec.measure.seed,
        "baseline": baseline.name if baseline else None,
        "baseline_threads": baseline.threads if baseline and alone else None,
    }
    if spec.trial_kind.trains:
        constant |= _trained(spec)
    if spec.trial_kind.trains and device == "cpu":
        constant["budget"] = spec.limits.rank_memory
    for point in itertools.product(*axes.values()):
        chosen: dict[str, Any] = dict(zip(axes, point, strict=True))
        chosen["documents"] = _lengths(spec, chosen["documents"], chosen["seq_len"])
        if isinstance(window := chosen["window"], Window):
            chosen["window"] = (window.left, window.right)
        if spec.trial_kind.trains:
            chosen |= _sizes(spec, chosen["model"])
            if chosen["pool"]:
                unset = POOLED.keys() - spec.strategy.model_fields_set
                chosen |= {name: POOLED[name] for name in unset}
            chosen |= {name: chosen[name] or None for name in ("pool", "offload")}
        # A default and its value are one point, so both have one normal form.
        chosen["kv_heads"] = chosen["kv_heads"] or chosen["heads"]
        if spec.trial_kind.decodes:
            chosen["new_tokens"] = chosen["new_tokens"] or 1
        if chosen["value_head_dim"] == chosen["head_dim"]:
            chosen["value_head_dim"] = None
        for searched in _searched(spec.trial_kind, chosen, device):
            yield TrialConfig.from_dict(chosen | searched | constant)


def _lengths(spec: Spec, documents: Any, seq_len: int) -> int | tuple[int, ...] | None:
    """Returns documents as a config has them: their number, or their lengths."""
    if not isinstance(documents, DrawnDocuments):
        return getattr(documents, "lengths", documents)
    try:
        return drawn(documents.lengths, seq_len, documents.seed)
    except UserError as error:
        raise spec.error("problem.documents", str(error)) from None


def _sizes(spec: Spec, name: str) -> dict[str, Any]:
    sizes_asked = {size: getattr(spec.training, size) for size in _SIZES}
    try:
        model = sizes.named(name, sizes_asked)
        check_layers(model)
    except (UserError, ValueError) as error:
        field, _, text = str(error).partition(": ")
        if field not in _SIZES:  # but the model, or its file
            field, text = "model", str(error).removeprefix("model: ").removeprefix("MODEL: ")
        raise spec.error(f"training.{field}", text) from None
    if Path(name).expanduser().exists() and name not in sizes.table():
        name = str(_absolute(name))
    return {"model": name, **{size: getattr(model, size) for size in _SIZES}}


def _trained(spec: Spec) -> dict[str, Any]:
    """Returns the constant fields of trainings: a step is a repeat, and has no baseline."""
    train = spec.training
    paths = tuple(_absolute(path) for path in spec.sweep("training", "corpus") if path is not None)
    return {
        "warmup": 0, "repeats": train.steps, "baseline": None, "baseline_threads": None,
        "task": spec.trial_kind.task or None, "examined": limits.check_task(spec),
        "learning_rate": train.learning_rate, "rope_theta": train.rope_theta,
        "micro_batch": train.micro_batch, "corpus": paths or None,
        "tokenizer": _absolute(train.tokenizer), "checkpoints": _absolute(train.checkpoints),
        "save_every": train.save_every if train.checkpoints else None,
    }  # fmt: skip


def _ladder(shortest: int, longest: int) -> list[int]:
    """Returns lengths up to ``longest``, of which each is about 9% longer than the one before."""
    count = int(8 * math.log2(longest / shortest))
    lengths = [round(shortest * 2 ** (i / 8) / _LENGTHS) * _LENGTHS for i in range(count + 1)]
    return sorted(
        {shortest, longest, *(length for length in lengths if shortest < length < longest)}
    )


def _absolute(path: str | None) -> str | None:
    """Returns a path as ranks understand it, whose working directory is another one."""
    return None if path is None else str(Path(path).expanduser().absolute())


def _searched(kind: TrialKind, chosen: Mapping[str, Any], device: str) -> Iterator[dict[str, Any]]:
    """Yields the values of the fields that a tuning kind searches at one point of the sweep."""
    if kind.independent_ranks:
        blocks = chosen["blocks"]
        # What is searched is compared with the default.
        cuts = kernel_cuts.cuts(chosen, device) if blocks is None else [blocks]
        for cut in dict.fromkeys([*cuts, *([None] if isinstance(blocks, int) else [])]):
            yield {"ring_size": 1, **tuned.DEFAULTS, "blocks": cut}
    elif kind.tunes:
        yield from _strategies(chosen)
        yield dict(tuned.DEFAULTS)
    else:
        yield {}


def _strategies(chosen: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    both = chosen["direction"] == "forward+backward"
    packed = chosen["documents"] is not None or chosen["chunk"] is not None
    choices = {
        "partition": list(NAMES if packed else PARTITIONS),  # else zigzag is as even
        "transport": transports.searched(chosen["ring_size"], chosen["heads"], chosen["kv_heads"]),
        "backward": list(walk.BACKWARDS) if both else ["planned"],
    }
    left_open = [name for name in choices if chosen[name] == "auto"]
    for values in itertools.product(*(choices[name] for name in left_open)):
        values_of = dict(zip(left_open, values, strict=True))
        if values_of.get("backward", "planned") == "planned" or _walks({**chosen, **values_of}):
            yield values_of


def _walks(chosen: Mapping[str, Any]) -> bool:
    """Tells whether the transport has several ways back, which needs chunks that walk."""
    heads, kv_heads = chosen["heads"], chosen["kv_heads"]
    try:
        return transports.plan(chosen["transport"], chosen["ring_size"], heads, kv_heads).walks
    except ValueError:
        return False
