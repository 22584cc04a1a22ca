"""Numbers and configurations as short text, the same in plans, live views and results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringray.base.redaction import plain
from ringray.base.units import ABSENT, plural
from ringray_kernels.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ringray.lab.plan.plan import Plan

# Column heads of config fields, in the order in which a person compares them.
HEADS = {
    "ring_size": "ring",
    "partition": "partition",
    "transport": "transport",
    "seq_len": "length",
    "batch": "batch",
    "heads": "heads",
    "kv_heads": "kv heads",
    "head_dim": "head dim",
    "dtype": "dtype",
    "causal": "causal",
    "window": "window",
    "documents": "docs",
    "direction": "direction",
    "backward": "backward",
    "backend": "backend",
    "blocks": "blocks",
    "threads": "threads",
}
# What is computed, and how: trials that agree in the first may be compared in the second.
PROBLEM = (
    "seq_len", "batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "window", "documents",
    "direction",
)  # fmt: skip
STRATEGY = (
    "ring_size", "partition", "transport", "backward", "backend", "blocks", "threads",
)  # fmt: skip
# These explain themselves; the others are named in a label ("window 17").
_PLAIN = ("partition", "transport", "seq_len", "dtype", "direction", "backend")
_SHORT = {
    **{name: dtype.short for name, dtype in DTYPES.items()},
    "forward": "fwd",
    "forward+backward": "fwd+bwd",
}


def varying(configs: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Config fields with more than one value, in the order of ``HEADS``; never the replica."""
    values: dict[str, set[str]] = {name: set() for name in HEADS}
    for config in configs:
        for name, seen in values.items():
            seen.add(repr(config.get(name)))
    return tuple(name for name, seen in values.items() if len(seen) > 1)


def value(name: str, given: Any) -> str:
    """A config value as a table shows it."""
    if given is None:
        return "no" if name in ("window", "documents") else ABSENT
    if isinstance(given, bool):
        return "yes" if given else "no"
    if isinstance(given, list | tuple):
        return f"{len(given)} given"
    if name == "blocks":
        return plain(str(given)).replace(",", " ")  # so that a cell can break between kernels
    return _SHORT.get(given, plain(given)) if isinstance(given, str) else str(given)


def label(config: Mapping[str, Any], fields: Sequence[str]) -> str:
    """One line that tells a trial from the others of its sweep."""
    words = []
    for name in fields:
        given = config.get(name)
        if name in _PLAIN:
            words.append(str(given))
        elif name == "causal":
            words.append("causal" if given else "full")
        elif name in ("window", "documents"):
            absent = f"no {name}"
            words.append(absent if given is None else f"{HEADS[name]} {value(name, given)}")
        else:
            words.append(f"{HEADS[name]} {value(name, given)}")
    return " ".join(words)


def constants(configs: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> str:
    """What all trials share, in a phrase: "ring of 2 on auto, 1 thread per rank, ..."."""
    first = configs[0]
    known = {name: value(name, first.get(name)) for name in HEADS if name not in fields}
    said = []
    if "ring_size" in known:
        said.append(f"ring of {known['ring_size']}")
    said.append(f"device {first['device']}")
    if "threads" in known:
        said.append(f"{plural(first['threads'], 'thread')} per rank")
    if "seq_len" in known:
        said.append(f"{first['seq_len']} tokens")
    if "heads" in known and "head_dim" in known:
        said.append(f"{known['heads']} heads × {known['head_dim']}")
        known.pop("heads")
        known.pop("head_dim")
    said += [
        f"{HEADS[name]} {known[name]}"
        for name, usual in (("heads", None), ("head_dim", None), ("batch", 1))
        if name in known and first[name] != usual
    ]
    if "kv_heads" in known and first["kv_heads"] != first["heads"]:
        said.append(f"{known['kv_heads']} K/V heads")
    if "dtype" in known:
        said.append(first["dtype"])
    if "causal" in known:
        said.append("causal" if first["causal"] else "not causal")
    said += [
        f"{HEADS[name]} {known[name]}"
        for name in ("window", "documents")
        if name in known and first[name] is not None
    ]
    said += [first[name] for name in ("direction", "partition") if name in known]
    said += [
        f"{HEADS[name]} {known[name]}"
        for name, usual in (
            ("transport", "ring"), ("backward", "auto"), ("backend", "auto"), ("blocks", None),
        )
        if name in known and first[name] != usual
    ]  # fmt: skip
    return ", ".join(said)


def measured(config: Mapping[str, Any]) -> str:
    """How each point is measured: "1 warm-up, 5 repeats, beside SDPA with 2 threads"."""
    said = f"{config['warmup']} warm-up, {plural(config['repeats'], 'repeat')}"
    compared = baseline(config)
    return f"{said}, beside {compared}" if compared else said


def baseline(config: Mapping[str, Any]) -> str | None:
    """What a trial is compared with, or None."""
    if not config.get("baseline"):
        return None
    threads = config.get("baseline_threads")
    return config["baseline"].upper() + (f" with {plural(threads, 'thread')}" if threads else "")


def pruned(plan: Plan) -> list[str]:
    """One line per reason, with the number of points that it prunes."""
    found: dict[str, int] = {}
    for trial in plan.trials:
        if trial.pruned is not None:
            found[str(trial.pruned)] = found.get(str(trial.pruned), 0) + 1
    return [f"{plural(count, 'point')} pruned: {why}" for why, count in found.items()]


def counts(by_status: Mapping[str, int], pending: int = 0) -> str:
    """``14 ok · 1 oom · 1 failed``, in the order of the statuses."""
    order = ("ok", "oom", "pruned", "timeout", "failed")
    known = [f"{by_status[name]:,} {name}" for name in order if by_status.get(name)]
    if pending:
        known.append(f"{pending:,} pending")
    return " · ".join(known) or "nothing"
