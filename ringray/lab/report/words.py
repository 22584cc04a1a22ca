"""Configurations and metrics as short text, the same in plans, live views and results."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringray.base import units
from ringray.base.redaction import plain
from ringray.base.units import ABSENT, digits, duration, mib, plural, ratio, share
from ringray.lab.kinds.baselines import BASELINES
from ringray.lab.trial.metrics import Metric
from ringray.lab.trial.outcome import STATUSES
from ringray.traffic.mask import LIMITS
from ringray_kernels.dtypes import DTYPES

if TYPE_CHECKING:  # `ringray list` needs no plan, and starts fast
    from ringray.lab.plan.plan import Plan
    from ringray.lab.predict.hardware import Fleet, Hardware

_OF_MASKS = sorted(LIMITS, key=lambda name: name == "documents")
# Fields of the problem and of the strategy: trials of one problem may be compared.
PROBLEM = (
    "seq_len", "batch", "heads", "kv_heads", "head_dim", "value_head_dim", "softcap", "sinks",
    "alibi", "dropout_p", "dtype", "quantize", "causal", *_OF_MASKS, "direction", "new_tokens",
    "model",
)  # fmt: skip
_FIELDS = (
    "ring_size", "partition", "transport", "order", *PROBLEM, "backward", "backend", "blocks",
    "threads", "dp", "tp", "pp", "pool", "kept", "offload", "mlp_rows", "scores",
)  # fmt: skip
STRATEGY = tuple(name for name in _FIELDS if name not in PROBLEM)
# Column headings of both, in the order of comparison.
HEADS = {name: name.replace("_", " ") for name in _FIELDS}
HEADS |= {"ring_size": "ring", "seq_len": "length", "documents": "docs"}
TEXTS = ("partition", "transport", "dtype", "causal", "direction", "backward", "backend")
# In a trial's name these need no heading; the others have one ("window17").
_PLAIN = ("partition", "transport", "seq_len", "dtype", "direction", "backend", "device")
_SHORT_HEADS = {"ring_size": "ring", "kv_heads": "kv", "head_dim": "dim", "documents": "docs"}
_SHORT_HEADS |= {"value_head_dim": "vdim", "global_tokens": "global"}
_REASONS = 8  # lines of pruned points
_FIRST = ("partition", "ring_size", "seq_len", "direction", "dtype")  # in a trial's name
_SHORT = {
    **{name: dtype.short for name, dtype in DTYPES.items()},
    "forward": "fwd",
    "forward+backward": "fwd+bwd",
}


def varying(
    configs: Iterable[Mapping[str, Any]], among: Iterable[str] = tuple(HEADS)
) -> tuple[str, ...]:
    """Returns the config fields with more than one value, in the order of ``among``."""
    every = list(configs)
    first = every[0] if every else {}
    return tuple(name for name in among if any(c.get(name) != first.get(name) for c in every))


def value(name: str, setting: Any) -> str:
    """Writes a config value as a table shows it."""
    if setting is None:
        return "no" if name in _OF_MASKS else ABSENT
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    if isinstance(setting, list | tuple):
        return _several(name, setting)
    if name == "blocks":
        return plain(str(setting)).replace(",", " ")  # so that a cell can break between kernels
    return _SHORT.get(setting, plain(setting)) if isinstance(setting, str) else str(setting)


def label(config: Mapping[str, Any], fields: Iterable[str]) -> str:
    """Returns one line that tells a trial from the others of its sweep."""
    return " ".join(_part(name, config.get(name)) for name in fields)


def names(configs: Mapping[str, Mapping[str, Any]], alone: str) -> dict[str, str]:
    """Returns a short name for each trial, from the fields that vary; ``alone`` if none does."""
    fields = list(varying(configs.values()))
    fields.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    if len({config.get("replica") for config in configs.values()}) > 1:
        fields.append("replica")
    return {key: label(config, fields)[:200] or alone for key, config in configs.items()}


def shared(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the fields that have the same value in all configs."""
    return {
        name: first
        for name, first in (configs[0] if configs else {}).items()
        if all(name in config and config[name] == first for config in configs)
    }


def flat(fields: Mapping[str, Any], separator: str, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested fields, each with its full name."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f"{before}{name}{separator}")
        else:
            yield f"{before}{name}", value


def _part(name: str, setting: Any) -> str:
    if name == "causal":
        return "causal" if setting else "full"
    head = _SHORT_HEADS.get(name, name)
    if setting is None:
        return "default-blocks" if name == "blocks" else f"no-{head}"
    if setting is True:
        return head
    if isinstance(setting, list | tuple):
        setting = _several(name, setting)
    if name in _PLAIN:
        return plain(str(setting), " ")
    separator = "" if isinstance(setting, int | float) else "-"
    text = setting if isinstance(setting, str) else json.dumps(setting)
    return plain(f"{head}{separator}{text}", " ")


def _several(name: str, values: Sequence[Any]) -> str:
    """Writes both sides of a window, nothing for an open one ("64:64"), or of other values their
    number and the start of a digest, which tells lists as long from each other ("23:5cd04f")."""
    if name == "window":
        return ":".join("" if side is None else str(side) for side in values)
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    return f"{len(values)}:{digest[:6]}"


def constants(first: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Writes the config values that all trials share with the ``first``, which are all but those of
    ``fields``: "ring of 2, device auto, ..."."""
    from ringray import transport  # with numpy, which `ringray list` does not need

    together = not {"heads", "head_dim"} & set(fields)
    usual = {"batch": 1, "transport": transport.DEFAULT, "backward": "auto", "backend": "auto"}

    def named(name: str) -> str:
        setting = first.get(name)
        return "" if setting == usual.get(name) else f"{HEADS[name]} {value(name, setting)}"

    phrases = {
        "ring_size": f"ring of {first['ring_size']}",
        "device": f"device {first['device']}",
        "threads": f"{plural(first['threads'], 'thread')} per rank",
        "seq_len": f"{first['seq_len']} tokens",
        "heads": f"{first['heads']} heads × {first['head_dim']}" if together else named("heads"),
        "head_dim": "" if together else named("head_dim"),
        "kv_heads": f"{first['kv_heads']} K/V heads" * (first["kv_heads"] != first["heads"]),
        **{name: name * bool(first.get(name)) for name in ("sinks", "alibi")},
        "dtype": first["dtype"],
        "quantize": named("quantize"),
        "causal": "causal" if first["causal"] else "not causal",
        "direction": first["direction"],
        "partition": first["partition"],
    }
    leading = ("ring_size", "device", "threads", "seq_len", "heads", "head_dim")
    names = [name for name in dict.fromkeys((*leading, *PROBLEM, *STRATEGY)) if name not in fields]
    texts = (phrases[name] if name in phrases else named(name) for name in names)
    return ", ".join(filter(None, texts))


def measured(config: Mapping[str, Any]) -> str:
    """Writes how each point is measured: "1 warm-up, 5 repeats, beside SDPA with 2 threads"."""
    runs = f"{config['warmup']} warm-up, {plural(config['repeats'], 'repeat')}"
    compared = baseline(config)
    return f"{runs}, beside {compared}" if compared else runs


def baseline(config: Mapping[str, Any], *, where: bool = False) -> str | None:
    """Writes the baseline of a trial with its threads, and ``where`` it is computed; None without a
    baseline."""
    if not config.get("baseline"):
        return None
    threads, name = config.get("baseline_threads"), config["baseline"]
    text = BASELINES[name].words if name in BASELINES else name  # of another version
    if where and name in BASELINES:
        text += f" {BASELINES[name].where}"
    return text + (f" with {plural(threads, 'thread')}" if threads else "")


def metric(which: Metric, metrics: Mapping[str, float]) -> str:
    """Writes a metric of a trial, or the range that it begins, in the unit of its column."""
    ends = [which.name, which.upto] if which.upto else [which.name]
    if any(name not in metrics for name in ends):
        return ABSENT
    return "–".join(number(which, metrics[name]) for name in ends)


def number(which: Metric, value: float | None) -> str:
    """Writes a value of a metric in the unit of its column; a dash for None."""
    return {"bytes": mib, "ratio": ratio, "share": share}.get(which.unit, digits)(value)


def pruned(plan: Plan) -> list[str]:
    """Writes each reason of pruned points in a line, with their number; at most ``_REASONS``."""
    lost = [trial for trial in plan.trials if trial.pruned is not None]
    reasons = Counter(str(trial.pruned) for trial in lost).most_common()
    lines = [f"{plural(count, 'point')} pruned: {why}" for why, count in reasons[:_REASONS]]
    if others := sum(count for _, count in reasons[_REASONS:]):
        lines.append(f"{plural(others, 'point')} pruned for {len(reasons) - _REASONS} more reasons")
    if any(trial.predicted for trial in lost):
        lines[-1] += "; --all measures also what a prediction rules out"
    return lines


def predicted_for(plan: Plan) -> list[str]:
    """Writes the hardware of the predictions, and how far they may be off."""
    on, hardware = (f"{plan.on}: " if plan.named else ""), plan.on.hardware
    costs = [trial.predicted for trial in plan.trials if trial.predicted]
    spreads = [cost.high_ms / cost.time_ms - 1 for cost in costs] or [hardware.spread]
    ends = min(spreads), max(spreads)
    within = " to ".join(dict.fromkeys(f"{spread:.0%}" for spread in ends))
    first = f"predicted for {on}{hardware.title}{fitted(hardware)}, times within {within}"
    if plan.on.shares_cores and not (plan.named or hardware.measured or hardware.fitted):
        first += "; `ringray calibrate` measures this machine"
    return [first, *filter(None, [linked(plan.on)]), *_models(plan)]


def _models(plan: Plan) -> list[str]:
    """Writes what is assumed about each model that is trained."""
    from ringray.models.sizes import named  # which imports numpy

    trained = (trial.config.training.model for trial in plan.trials if trial.config.training)
    models = [named(name, {}) for name in dict.fromkeys(trained) if name]
    return [
        f"{model.name}: trained as a Llama of its sizes; {'; '.join(model.assumptions)}"
        for model in models
        if model.assumptions
    ]


def linked(on: Fleet) -> str:
    """Writes when the links between the nodes of a fleet were measured; "" if they were not."""
    if not on.linked:
        return ""
    link = on.hardware.outer
    return f"{on.linked}: {units.bandwidth(link.bandwidth)}, {units.latency(link.latency)} latency"


def fitted(hardware: Hardware) -> str:
    """Writes to how many measured trials an entry is fitted; "" if to none."""
    trials = plural(hardware.fitted, "trial")
    return f", fitted to {trials} of the store" if hardware.fitted else ""


def warnings(plan: Plan) -> list[str]:
    """Warns of trials that the prediction sees beyond their memory or their time limit."""
    lines = [plan.tight] if plan.tight else []
    limit = plan.spec.limits.trial_timeout or math.inf
    if late := [trial.measuring_s for trial in plan.runnable if trial.measuring_s > limit]:
        lines.append(
            f"warning: {len(late):,} of {plural(len(plan.runnable), 'trial')} will probably exceed "
            f"limits.trial_timeout ({duration(limit)}): up to {duration(max(late))} are predicted, "
            "baseline included; raise the limit or leave it out"
        )
    return lines


def counts(by_status: Mapping[str, int], pending: int = 0) -> str:
    """Writes trials by status: ``14 ok · 1 oom · 1 failed``."""
    parts = [f"{by_status[name]:,} {name}" for name in STATUSES if by_status.get(name)]
    if pending:
        parts.append(f"{pending:,} pending")
    return " · ".join(parts) or "nothing"
