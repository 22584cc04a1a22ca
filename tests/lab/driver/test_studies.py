"""Tuned choices for `auto`: from a sweep to a table, and to what a spec or a call leaves open."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ringray.base import provenance
from ringray.lab import sweeps
from ringray.lab.driver import studies as result
from ringray.lab.driver.events import Summary
from ringray.lab.plan import plan
from ringray.lab.plan.kernel_cuts import kernel_of
from ringray.lab.plan.trial import Trial
from ringray.lab.report import studies as report
from ringray.lab.specs import model as spec
from ringray.lab.trial.outcome import NOT_REQUESTED, TrialRow
from ringray.tuning import table as tuned
from ringray_kernels.config import Blocks
from tests.support.place import Place

GPU = tuned.Place("NVIDIA H200", "abc", "2.13.0", "3.9.0")
KERNELS = (
    "version: 1\nname: k\nkind: kernel-tune\nring: {{size: 2, device: cuda}}\n"
    "problem: {{seq_len: {lengths}, heads: 8, kv_heads: 2, head_dim: 64}}\n"
    "measure: {{repeats: 3, baseline: null}}\nsearch: {search}\n"
    "strategy: {{blocks: ["
    "forward=128x64/8/3, forward=256x32/8/3, forward=128x128/8/3, "
    "dq=64x256/4/1, dq=64x64/8/2, dq=32x128/8/4, dkv=32x256/4/1, dkv=64x128/8/3]}}\n"
)


@cache
def built(lengths: str = "[5000, 8000]", search: str = "{}") -> plan.Plan:
    return plan.build(spec.parse(KERNELS.format(lengths=lengths, search=search)))


def rows(made: plan.Plan, ms: Callable[[Trial], float | None]) -> list[TrialRow]:
    """As a sweep that is over leaves them: measured where ``ms`` says how long, else not asked."""
    found = []
    for trial in made.runnable:
        took = ms(trial)
        metrics = {} if took is None else {"median_ms": took, "repeats": 3.0}
        found.append(
            TrialRow(
                trial.key, trial.index, trial.config.as_dict(), {},
                "pruned" if took is None else "ok", NOT_REQUESTED if took is None else None,
                metrics,
                {} if took is None else {"ms": [took] * 3}, "p", 1, 1.0, 2.0 + trial.index,
                {"place": asdict(GPU)},
            )
        )  # fmt: skip
    return found


def order(trial: Trial) -> int:
    """Another best for each length, among the cuts of each kernel."""
    return (trial.index * 7919 + trial.config.problem.seq_len) % 10007


def test_of_problems_that_share_a_bucket_the_largest_has_it(tmp_path: Path) -> None:
    made = built()
    kept = result.entries(made, rows(made, lambda t: 1.0 + order(t) + t.config.problem.seq_len))
    (entry,) = kept
    longest = [t for t in made.runnable if t.config.problem.seq_len == 8000]
    best = {
        kernel: min(
            (t for t in longest if kernel_of(t.config.strategy.blocks) == kernel), key=order
        )
        for kernel in ("forward", "dq", "dkv")
    }
    assert entry.choice["blocks"] == ",".join(str(t.config.strategy.blocks) for t in best.values())
    # It can be read, and is what a ring of such hops then takes.
    tuned.write(kept, tmp_path / "t.json")
    assert tuned.read(tmp_path / "t.json") == kept
    wanted = longest[0].config.buckets("cuda")
    assert tuned.Table(kept).find("kernel", wanted.kernel, GPU)[0] == entry
    assert Blocks.parse(entry.choice["blocks"]).dkv is not None


def test_the_faster_backend_is_kept(tmp_path: Path) -> None:
    """With made-up times: 5 for Triton."""
    text = KERNELS.partition("strategy")[0].format(lengths="8000", search="{}")
    made = plan.build(spec.parse(text + "strategy: {backend: [cudnn, triton]}\n"))
    for cudnn, kept_backend in ((4.0, "cudnn"), (6.0, "triton")):
        times = {"cudnn": cudnn, "triton": 5.0}
        ended = rows(made, lambda t, ms=times: ms[t.config.strategy.backend])  # type: ignore[misc]
        chosen = result.entries(made, ended)
        (entry,) = chosen
        tuned.write(chosen, tmp_path / "t.json")
        assert tuned.read(tmp_path / "t.json") == chosen
        assert entry.choice["backend"] == kept_backend
        assert entry.choice["compared"] == ["cudnn", "triton"]
        assert entry.metrics["median_ms"] == min(cudnn, 5.0)
        assert (entry.choice["blocks"] is None) == (kept_backend == "cudnn")


CUT = (
    "version: 1\nname: c\nkind: kernel-tune\nring: {size: 1, device: cpu}\n"
    "problem: {seq_len: 300, heads: 2, head_dim: 16, direction: forward}\n"
    "strategy: {blocks: [64, 128]}\nmeasure: {repeats: 3, baseline: null}\n"
)


@pytest.mark.parametrize(
    ("ms", "answer"),
    [
        ({None: 9.0, 64: 7.0, 128: 8.0}, "9 of 9 runs); the default, default-blocks, has 9.00 ms"),
        ({None: 9.0, 64: 9.5, 128: 9.1}, "; it is the default, so nothing is kept"),
    ],
)  # fmt: skip
def test_a_tuning_no_better_than_the_default_keeps_nothing(
    ms: dict[int | None, float], answer: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan.build(spec.parse(CUT))
    assert [trial.config.strategy.blocks for trial in made.trials] == [64, None, 128]
    ended = rows(made, lambda t: ms[t.config.strategy.blocks])  # type: ignore[index]
    ended = [row for _, row in sorted((row.config["blocks"] or 0, row) for row in ended)]
    kept = result.entries(made, ended)
    assert [entry.choice["blocks"] for entry in kept] == ([64] if ms[64] < 9 else [])
    (line,) = report.lines(made, ended, result.results(made, ended))
    assert answer in line
    monkeypatch.setattr(sweeps, "_measure", lambda *_: Summary(made.digest, "c", trials=ended))
    store: Any = None
    summary = sweeps._search(made, store, {})
    assert summary.exit_code == 0
    assert summary.tuned[0].startswith("1 choice in " if kept else "nothing, because no point")
    assert tuned.table().entries == kept


def test_a_point_of_few_runs_is_in_the_front_but_is_not_the_fastest() -> None:
    """As halving leaves one that it dropped early."""
    memory = {None: 3e6, 64: 2e6, 128: 1e6}
    objectives = "{objectives: [median_ms, peak_memory_bytes]}"
    made = plan.build(spec.parse(CUT.replace("repeats: 3", "repeats: 9") + f"search: {objectives}"))
    runs = {None: 9, 64: 9, 128: 2}
    ended = []
    for row in rows(made, lambda trial: 5.0 if trial.config.strategy.blocks else 9.0):
        blocks = row.config["blocks"]
        metrics = {"repeats": float(runs[blocks]), "peak_memory_bytes": memory[blocks]}
        samples = {"ms": [row.metrics["median_ms"]] * runs[blocks]}
        ended.append(replace(row, metrics=row.metrics | metrics, samples=samples))
    (study,) = result.results(made, ended)
    blocks_of = {trial.key: trial.config.strategy.blocks for trial in study.trials}
    assert [blocks_of[key] for key in study.front] == [128]
    assert blocks_of[study.best or ""] == 64


@pytest.mark.parametrize(
    ("busy", "kept"),
    [
        ((), True),
        ((64,), False),  # the winner
        ((None,), False),  # the default that it beats
        ((128,), True),  # another point, for a part of the time
        ((64, None, 128), False),
        ((64, "short"), False),  # what was too short by itself counts in the whole
    ],
)
def test_a_busy_machine_decides_no_choice(
    busy: tuple[Any, ...],
    kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = 2
    made = plan.build(spec.parse(CUT.replace("size: 1", f"size: {ranks}")))
    ms = {None: 9.0, 64: 7.0, 128: 8.0}
    ended = []
    for row in rows(made, lambda t: ms[t.config.strategy.blocks]):  # type: ignore[index]
        loads = {"cpu_percent": 100.0, "host_cpu_percent": ranks * 25.0 + 10.0}
        if row.config["blocks"] in busy:
            loads["host_cpu_percent"] += 65.0 if "short" in busy else 10.0
        took = 0.3 if "short" in busy else 3.0
        ended.append(replace(row, metrics=row.metrics | loads, started=1.0, ended=1.0 + took))
    choices = result.entries(made, ended, 4)
    assert [entry.choice["blocks"] for entry in choices] == [64] * kept
    assert len(result.entries(made, ended)) == 1  # on a host of unknown size
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path))
    monkeypatch.setattr(provenance, "hardware", lambda: {"cores": 4})
    monkeypatch.setattr(sweeps, "_measure", lambda *_: Summary(made.digest, "c", trials=ended))
    store: Any = None
    summary = sweeps._search(made, store, {})
    told = "1 choice in " if kept else "nothing for 1 problem, because other processes used "
    assert summary.tuned[0].startswith(told)
    assert summary.exit_code == 0
    assert len(tuned.table().entries) == kept
    memory = spec.parse(CUT + "search: {objectives: [peak_memory_bytes]}\n")
    study = result.results(made, ended)[0]
    by_key = {row.key: row for row in ended}
    assert result.load_of(replace(made, spec=memory), study, by_key, 4) is None


# For real

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


@pytest.mark.slow
def test_tuned_and_taken(place: Place) -> None:
    spec = place.spec(TUNE)
    first = place.run("tune", spec, "--no-tracking", "--json", "tune.jsonl")
    assert first.code == 0, first.err
    assert "best of tiny-tune: " in first.out
    assert "front of tiny-tune" in first.out
    assert "tuned:  1 choice in " in first.out
    entry = tuned.read(place.home / "tuned" / "local.json")[0]
    ended = place.lines(place.home / "tune.jsonl")
    measured = [line for line in ended if line["status"] == "ok"]
    # Each as it was measured last; of a few runs only who was measured half as often as any.
    last = {json.dumps(line["config"]): line["config"] | line["metrics"] for line in measured}
    often = [point for point in last.values() if 2 * point["repeats"] >= 4]
    least = min(point["peak_memory_bytes"] for point in often)  # exact, so it beats the default
    assert max(point["repeats"] for point in last.values()) == 4
    assert entry.metrics["peak_memory_bytes"] == least
    assert entry.choice["partition"] != "zigzag" or entry.choice["transport"] != "ring"
    unasked = [line for line in ended if line["status"] == "pruned"]
    assert len({line["config"]["partition"] + line["config"]["transport"] for line in ended}) == 12
    assert all("measured others" in line["reason"] for line in unasked)

    again = place.run("tune", spec, "--no-tracking", "--json", "again.jsonl")
    assert again.code == 0, again.err
    assert "connecting" not in again.out
    # A new file is told what is known; nothing was measured again.
    metrics_of = {json.dumps(line["config"]): line["metrics"] for line in ended}
    repeated = place.lines(place.home / "again.jsonl")
    assert [metrics_of[json.dumps(line["config"])] for line in repeated] == [
        line["metrics"] for line in repeated
    ]
    assert len(repeated) == 12

    taken = place.run("run", place.spec(TAKE), "--no-tracking", "--json", "take.jsonl")
    assert taken.code == 0, taken.err
    by_size = {line["config"]["ring_size"]: line for line in place.lines(place.home / "take.jsonl")}
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
    assert "ok" in {line["status"] for line in place.lines(place.home / "anew.jsonl")}
    assert "connecting" in anew.out
