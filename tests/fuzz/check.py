"""Checks of accepted plans, worked out without the code that accepted them.

Nothing here calls the planner's own rules: counts of visible pairs, divisibility and the product of
a sweep are worked out anew, from the canonical form of the spec and the flat configs of the trials.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ringray.lab.specs.model import parse

if TYPE_CHECKING:
    from ringray.lab.plan.plan import Plan
    from ringray.lab.plan.trial import Trial
    from ringray.lab.specs.model import Spec

AXES = {
    "ring": ("size", "threads", "order"),
    "problem": (
        "dtype", "seq_len", "batch", "heads", "kv_heads", "head_dim", "value_head_dim", "softcap",
        "sinks", "alibi", "dropout_p", "quantize", "causal", "window", "chunk", "prefix",
        "global_tokens", "shared_prefix", "documents", "direction", "new_tokens",
    ),
    "strategy": ("transport", "backward", "backend", "blocks", "partition"),
}  # fmt: skip
BOUNDS = {
    "ring_size": 1024, "threads": 256, "seq_len": 2**31 - 1, "batch": 65536, "heads": 1024,
    "kv_heads": 1024, "head_dim": 512,
}  # fmt: skip
NAMES = {
    "dtype": ("float32", "bfloat16", "float16"),
    "direction": ("forward", "forward+backward"),
    "partition": ("auto", "contiguous", "striped", "zigzag", "zigzag-token"),
    "backward": ("auto", "planned", "reverse", "query-side"),
    "backend": ("auto", "triton", "aten", "reference", "cudnn", "flash"),
    "device": ("auto", "cpu", "cuda"),
    "placement": ("pack", "spread", "strict-pack", "strict-spread"),
}
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
MOST_POINTS = 100_000
CHECKED = 60  # trials of one plan
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def accepted(spec: Spec, plan: Plan) -> None:
    """AssertionError, with what is wrong, where the spec or its plan is nonsense."""
    canonical = spec.canonical()
    _check_spec(spec, canonical)
    _check_points(canonical, plan)
    step = max(1, len(plan.trials) // CHECKED)
    for trial in plan.trials[::step]:
        _check_trial(canonical, trial)


def refused(message: str, path: str) -> None:
    """AssertionError where a refusal is not fit for a person: each line names the file, and none
    holds what a terminal would obey."""
    lines = message.splitlines()
    assert lines
    for line in lines:
        assert line.startswith(path), f"a line does not name the file: {line!r}"
        assert not _OBEYED.search(line), f"a terminal would obey {line!r}"
    assert len(message) < 40_000, "an error of more than a few pages"
    assert "pydantic" not in message
    assert "Traceback" not in message
    message.encode()


def _check_spec(spec: Spec, canonical: dict[str, Any]) -> None:
    text = json.dumps(canonical, allow_nan=False)
    again = parse(text, "again.yaml")
    assert again.digest == spec.digest, "the canonical form has another digest"
    assert again.canonical() == canonical, "the canonical form means something else"
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", canonical["name"])
    assert canonical["version"] == 1
    limits, measure = canonical["limits"], canonical["measure"]
    assert limits["trial_timeout"] is None or 1 <= limits["trial_timeout"] <= 86400
    assert 1 <= limits["place_timeout"] <= 86400
    assert 0 <= limits["retries"] <= 10
    assert 0 <= measure["warmup"] <= 100
    assert 1 <= measure["repeats"] <= 1000
    assert 0 < spec.search.share <= 1
    for name in ("experiment", "uri"):
        said = canonical["tracking"][name]
        assert said is None or not _OBEYED.search(said), f"tracking.{name}: {said!r}"


def _swept(canonical: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of each axis. A list of one axis is always a sweep: no value is a list itself."""
    axes = {}
    for section, names in AXES.items():
        for name in names:
            value = canonical[section][name]
            axes[name] = value if isinstance(value, list) else [value]
    return axes


def _check_points(canonical: dict[str, Any], plan: Plan) -> None:
    keys = [trial.key for trial in plan.trials]
    assert len(set(keys)) == len(keys), "two trials have one key"
    assert [trial.index for trial in plan.trials] == list(range(len(keys)))
    assert 0 < len(keys) <= MOST_POINTS
    if canonical["kind"] in ("strategy-tune", "kernel-tune", "max-context"):
        return  # each point stands for as many as its open fields, or its lengths, have values
    points, axes = set(), _swept(canonical)
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        point["kv_heads"] = point["kv_heads"] or point["heads"]
        point["value_head_dim"] = point["value_head_dim"] or point["head_dim"]
        if canonical["kind"] == "decode":
            point["new_tokens"] = point["new_tokens"] or 1
        points.add(json.dumps(point))
    replicas = canonical["measure"]["replicas"]
    assert len(keys) == len(points) * replicas, f"{len(keys)} trials, {len(points)} × {replicas}"


def _check_trial(canonical: dict[str, Any], trial: Trial) -> None:
    config = trial.config.as_dict()
    for name, most in BOUNDS.items():
        assert type(config[name]) is int, name
        assert 1 <= config[name] <= most, name
    for name, names in NAMES.items():
        assert config[name] in names, name
    assert type(config["causal"]) is bool
    assert trial.pruned or trial.predicted, "neither pruned nor predicted"
    if trial.pruned is not None:
        section, _, field = trial.pruned.field.partition(".")
        assert field in canonical[section], f"{trial.pruned.field} is no field"
        assert trial.pruned.text
        by_prediction = trial.pruned.text.startswith("predicted ")
        assert (trial.predicted is not None) == by_prediction
        return
    _check_fits(config)
    _check_cost(config, trial.predicted)


def _check_fits(config: dict[str, Any]) -> None:
    """Checks that a point can run: sizes that multiply out, masks that mean something."""
    ring, heads, kv_heads = config["ring_size"], config["heads"], config["kv_heads"]
    assert heads % kv_heads == 0, "heads do not divide"
    window = config["window"]
    if isinstance(window, list):
        assert all(side is None or side >= 0 for side in window)
        assert not (config["causal"] and window[1]), "a causal query sees later keys"
    else:
        assert window is None or (config["causal"] and window >= 0)
    assert config.get("chunk", 1) >= 1
    assert config.get("prefix", 0) >= 0
    assert config["causal"] or "prefix" not in config
    if "global_tokens" in config:
        assert config["global_tokens"] >= 1
        assert window is not None or "chunk" in config, "all see them"
        assert "prefix" not in config
    if "shared_prefix" in config:
        assert config["shared_prefix"] >= 1
        limits = [window, config.get("chunk"), config["documents"]]
        assert any(limit is not None for limit in limits), "all see them"
        assert not {"prefix", "global_tokens"} & set(config)
    documents = config["documents"]
    if isinstance(documents, list):
        assert sum(documents) == config["seq_len"], "documents do not fill the sequence"
        assert min(documents) >= 0
    else:
        assert documents is None or 1 <= documents <= 65536
    name, _, number = config["transport"].partition(":")
    count = int(number or 0)
    if name == "ulysses":
        assert heads % ring == 0, "ulysses: query heads"
        assert kv_heads % ring == 0, "ulysses: K/V heads"
    elif name == "hybrid" and count:
        assert ring % count == 0, "hybrid: the ring"
        assert heads % count == 0, "hybrid: the heads"
        assert kv_heads % count == 0, "hybrid: the heads"
    elif name == "double-ring" and count:
        assert ring % count == 0, "double-ring: the ring"


def _check_cost(config: dict[str, Any], cost: Any) -> None:
    for name, value in cost._asdict().items():
        assert math.isfinite(value), f"{name} is {value}"
        assert value >= 0, f"{name} is {value}"
    pairs = _pairs(config)
    if "model" in config:
        return  # the cost of a training has its own tests
    if pairs is not None:
        backward = config["direction"] == "forward+backward"
        products = (1 + 3 * backward) * config["head_dim"] + (1 + 2 * backward) * _values(config)
        flops = pairs * 2 * products * config["heads"] * config["batch"]
        assert cost.flops == flops, f"{cost.flops} FLOPs, expected {flops}"
    assert all(getattr(cost, name) for name in ("flops", "time_ms")), "work that takes nothing"
    assert 0 < cost.balance <= 1 + 1e-9, f"balance {cost.balance}"
    rows = -(-config["seq_len"] // config["ring_size"])
    width = config["head_dim"] + _values(config)
    tensors = config["kv_heads"]  # k with v
    if "new_tokens" not in config:
        tensors += config["heads"]  # q with out
    row = config["batch"] * tensors * (width // 2 * 2) * ITEMSIZE[config["dtype"]]
    assert cost.peak_memory_bytes >= rows * row, f"{cost.peak_memory_bytes} bytes are too few"
    assert cost.peak_memory_bytes < 2**60, "more than any machine has"
    assert (cost.sent_bytes == 0) == (cost.messages == 0)
    if config["ring_size"] == 1:
        assert cost.sent_bytes == 0, "a ring of one sends"
    # At the very most every rank sends all that there is, and its gradients in fp32, to all others.
    everything = (rows + 2) * config["ring_size"] * config["batch"] * width * 4
    everything *= 4 * (config["heads"] + config["kv_heads"]) + config["heads"]
    assert cost.sent_bytes <= 4 * everything * config["ring_size"], "more than there is"


def _values(config: dict[str, Any]) -> int:
    return config.get("value_head_dim") or int(config["head_dim"])


def _pairs(config: dict[str, Any]) -> int | None:
    """Visible pairs of query and key, document by document; None where that takes long."""
    length, documents = config["seq_len"], config["documents"]
    lengths = [length]
    if isinstance(documents, list):
        lengths = documents
    elif documents is not None:
        if documents > 5000:
            return None
        weights = [1 + i % 3 for i in range(documents)]
        total = sum(weights)
        bounds = [length * below // total for below in itertools.accumulate(weights, initial=0)]
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
    window = config["window"] if isinstance(config["window"], list) else [config["window"], None]
    left, right = (length if side is None else side for side in window)
    right = 0 if config["causal"] else right
    if length <= 1 << 21:
        begins = itertools.accumulate(lengths, initial=0)
        each = zip(lengths, begins, strict=False)
        return sum(_row_by_row(one, left, right, config, begin) for one, begin in each)
    rare = {"chunk", "prefix", "new_tokens", "global_tokens", "shared_prefix"} & set(config)
    if rare or not (right == 0 or left == right == length):
        return None
    found = 0
    for one in lengths:
        near = min(left + 1, one)
        found += near * (near + 1) // 2 + (one - near) * near if right == 0 else one * one
    return found


def _row_by_row(length: int, left: int, right: int, config: dict[str, Any], first: int) -> int:
    """Visible pairs of one document, of its new tokens where a step of decoding is planned."""
    chunk, prefix = config.get("chunk", length or 1), min(config.get("prefix", 0), length)
    row = np.arange(length)
    begin = row // chunk * chunk
    low = np.maximum(begin, row - left)
    high = np.minimum(np.minimum(begin + chunk, length), row + right + 1)
    low[:prefix], high[:prefix] = 0, prefix
    if (tokens := min(config.get("global_tokens", 0), length)) and not config["causal"]:
        low[:tokens], high[:tokens] = 0, length
    before = np.minimum(tokens, low)  # global tokens that no window has
    if shared := min(config.get("shared_prefix", 0), config["seq_len"]):
        stop = np.minimum(shared, first + row + 1) if config["causal"] else shared
        low, high = (np.maximum(first + bound, stop) for bound in (low, high))
        before = stop
    return int((before + high - low)[-config.get("new_tokens", length) :].sum())
