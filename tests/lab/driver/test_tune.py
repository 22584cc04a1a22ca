"""A tuning sweep for real: searched, kept, and then taken where a spec or a call leaves it open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringray.tuning import table as tuned
from tests.support.place import Place

TUNE = """\
version: 1
name: tiny-tune
kind: strategy-tune
ring: {size: 2, device: cpu}
problem: {seq_len: 64, heads: 2, head_dim: 16, dtype: float32, direction: forward}
strategy: {partition: auto, transport: [ring, bidirectional, ulysses]}
measure: {warmup: 1, repeats: 4, baseline: null}
search: {method: halving, objectives: [peak_memory_bytes, median_ms], budget: 0.6}
"""
TAKE = """\
version: 1
name: tiny-take
kind: correctness
ring: {size: [2, 3], device: cpu}
problem: {seq_len: 64, heads: 2, head_dim: 16, dtype: float32, direction: forward}
strategy: {partition: auto, transport: auto}
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_tuned_and_taken(place: Place) -> None:
    spec = place.spec(TUNE)
    first = place.run("tune", spec, "--no-tracking", "--json", "tune.jsonl")
    assert first.code == 0, first.err
    assert "best of tiny-tune: " in first.out
    assert "front of tiny-tune" in first.out
    assert "tuned:  1 choice in " in first.out
    entry = tuned.read(place.home / "tuned" / "local.json")[0]
    ended = lines(place.home / "tune.jsonl")
    measured = [line for line in ended if line["status"] == "ok"]
    # Each as it was measured last; of a few runs only who was measured half as often as any.
    last = {json.dumps(line["config"]): line["config"] | line["metrics"] for line in measured}
    often = [one for one in last.values() if 2 * one["repeats"] >= 4]
    least = min(one["peak_memory_bytes"] for one in often)  # exact, so it beats the default
    assert max(one["repeats"] for one in last.values()) == 4
    assert entry.metrics["peak_memory_bytes"] == least
    assert entry.choice["partition"] != "zigzag" or entry.choice["transport"] != "ring"
    unasked = [line for line in ended if line["status"] == "pruned"]
    assert len({line["config"]["partition"] + line["config"]["transport"] for line in ended}) == 12
    assert all("measured others" in line["reason"] for line in unasked)

    again = place.run("tune", spec, "--no-tracking", "--json", "again.jsonl")
    assert again.code == 0, again.err
    assert "connecting" not in again.out
    # A new file is told what is known; nothing was measured again.
    known = {json.dumps(line["config"]): line["metrics"] for line in ended}
    told = lines(place.home / "again.jsonl")
    assert [known[json.dumps(line["config"])] for line in told] == [one["metrics"] for one in told]
    assert len(told) == 12

    taken = place.run("run", place.spec(TAKE), "--no-tracking", "--json", "take.jsonl")
    assert taken.code == 0, taken.err
    by_size = {line["config"]["ring_size"]: line for line in lines(place.home / "take.jsonl")}
    chosen = by_size[2]["environment"]["chosen"]
    assert chosen["partition"] == entry.choice["partition"]
    assert chosen["transport"] == entry.choice["transport"]
    assert entry.sweep[:8] in chosen["source"]
    default = by_size[3]["environment"]["chosen"]
    assert (default["partition"], default["transport"]) == ("zigzag", "ring")
    assert "nothing tuned" in default["source"]
    assert "nothing tuned for this shape" in taken.out

    shown = place.run("tuned")
    assert "ring 2, 64 tokens" in shown.out
    assert "yes" in shown.out
    assert place.run("tuned", "--export", "ours.json").code == 0
    assert place.run("tuned", "--import", "ours.json").code == 0
    assert len(tuned.read(place.home / "tuned" / "local.json")) == 1

    anew = place.run("tune", spec, "--again", "--no-tracking", "--json", "anew.jsonl")
    assert anew.code == 0, anew.err
    assert "ok" in {line["status"] for line in lines(place.home / "anew.jsonl")}
    assert "connecting" in anew.out
