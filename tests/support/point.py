"""One point of a sweep, with defaults for the fields that a test does not give."""

from __future__ import annotations

from typing import Any

from ringray.lab.trial.config import TrialConfig


def point(**given: Any) -> TrialConfig:
    fields: dict[str, Any] = {
        "ring_size": 1, "threads": 1, "dtype": "float32", "seq_len": 64, "batch": 1, "heads": 8,
        "kv_heads": 8, "head_dim": 64, "causal": True, "window": None, "documents": None,
        "direction": "forward+backward", "transport": "ring", "backward": "auto",
        "backend": "auto", "blocks": None, "partition": "zigzag", "device": "cpu",
        "placement": "pack", "warmup": 1, "repeats": 5, "seed": 0, "baseline": None,
        "baseline_threads": None, "replica": 0,
    }  # fmt: skip
    if "kv_heads" not in given and "heads" in given:
        given["kv_heads"] = given["heads"]
    return TrialConfig.from_dict(fields | given)
