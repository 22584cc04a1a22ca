"""Long rings, predicted from shorter ones, against the whole simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ringray.lab.predict import cost_model, hardware, long_ring
from ringray.lab.trial.config import TrialConfig

RANKS = 288


def ring(rows: int = 1024, **changed: Any) -> TrialConfig:
    sizes = {"ring_size": RANKS, "seq_len": RANKS * rows, "heads": 32, "kv_heads": 8}
    fields = {"head_dim": 128, "dtype": "bfloat16", "backward": "planned", "device": "cuda"}
    return cost_model.causal_pass(**(sizes | fields | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"transport": "ring", "rows": 256},
        {"transport": "bidirectional", "backward": "query-side"},
        {"transport": "double-ring:8"},
        {"transport": "allgather", "direction": "forward"},
        {"transport": "direct", "partition": "striped"},
        {"transport": "ring", "window": 4096},
    ],
)
def test_a_long_ring_takes_what_its_simulation_takes(changed: dict[str, Any]) -> None:
    config, on = ring(**changed), hardware.parse_fleet("h100:36x8")
    assert long_ring.shorter(config, on) == 64
    whole, predicted = cost_model.predict(config, on), long_ring.predict(config, on)
    for name in ("time_ms", "low_ms", "high_ms"):
        assert getattr(predicted, name) == pytest.approx(getattr(whole, name), rel=0.01)
    assert predicted.exposed_ms == pytest.approx(whole.exposed_ms, abs=0.015 * whole.time_ms)
    assert predicted.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=1e-4)
    if "window" not in changed:
        for name in ("flops", "sent_bytes", "messages", "inner_bytes", "outer_bytes"):
            assert getattr(predicted, name) == pytest.approx(getattr(whole, name), rel=2e-3)


def test_a_ring_that_is_not_long_is_simulated_whole() -> None:
    on = hardware.parse_fleet("h100:36x8")
    short = ring().changed(ring_size=128, seq_len=1 << 17)
    assert long_ring.shorter(short, on) is None
    assert long_ring.predict(short, on) == cost_model.predict(short, on)
    # Of few ranks that exchange heads, chunks walk among a part of them.
    assert long_ring.shorter(ring(transport="hybrid:8"), on) is None
    # Whole nodes, and at least two: 72 ranks lie together.
    together = replace(on, nodes=4, per_node=72)
    assert long_ring.shorter(ring().changed(ring_size=577, seq_len=577 << 10), together) == 144
    assert long_ring.shorter(ring(rows=64, window=4096), on) is None
