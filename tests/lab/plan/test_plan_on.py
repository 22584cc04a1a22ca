"""Plans for hardware that is not here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ringray.base.errors import SpecError
from ringray.lab.cli import main
from ringray.lab.cli.spec import _totals
from ringray.lab.plan.plan import Plan, build
from ringray.lab.predict.hardware import gpus, parse_fleet, table
from ringray.lab.specs.model import parse

SPEC = """
version: 1
name: far
kind: latency
ring: {{size: {size}}}
problem: {{seq_len: 64k, heads: 32, kv_heads: 8, head_dim: 128, direction: forward}}
strategy: {{transport: [ring, "double-ring:8"]}}
{more}
"""


def made(size: int = 64, more: str = "", on: str | None = None) -> Plan:
    spec = parse(SPEC.format(size=size, more=more))
    return build(spec, parse_fleet(on) if on else None)


def times(plan: Plan) -> list[float]:
    return [trial.predicted.time_ms for trial in plan.trials if trial.predicted]


def test_a_cluster_of_the_spec_is_that_of_the_option() -> None:
    assert times(made(on="h100:8x8")) == times(made(more="cluster: h100:8x8"))
    assert made(on="h100:8x8").device == "cuda"
    here = build(parse(SPEC.format(size=2, more="cluster: h100:8x8")), machine=1 << 34)
    assert (here.named, here.device) == (False, "cpu")


@pytest.mark.usefixtures("home")
def test_a_cluster_that_is_not_used_is_checked_but_needs_no_calibration() -> None:
    """A run without an address measures here all the same."""
    local = parse(SPEC.format(size=2, more="cluster: local:16"))
    assert not build(local, machine=1 << 34).named
    with pytest.raises(SpecError, match="run `ringray calibrate`"):
        build(local)
    with pytest.raises(SpecError, match="did you mean 'h100'"):
        build(parse(SPEC.format(size=2, more="cluster: h10:8")), machine=1 << 34)


def test_nodes_and_their_ports_change_the_winner() -> None:
    """In one node the transports do not differ; across nodes the ring waits for single ports."""
    ring, double = times(made(size=8, on="h100:8"))
    assert ring == pytest.approx(double, rel=0.1)
    ring, double = times(made(on="h100:8x8"))
    assert double < 0.8 * ring


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("h101:8x8", "hardware: got 'h101', expected one of .*did you mean 'h100'"),
        ("h100:8x9", "9 ranks per node, but a node of h100 has at most 8"),
        ("h100:0x8", "expected h100:RANKS of one node or h100:NODESxRANKS"),
        ("h100:99999x8", "799,992 ranks, expected at most 65,536"),
        ("h100:2x8", r"ring\.size: got 64, but h100:2x8 has 16 ranks"),
        ("nowhere.yaml:8", "nowhere.yaml cannot be read"),
    ],
)
def test_errors_of_clusters_name_the_field(on: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        made(more=f"cluster: {on}")
    assert error.value.field in ("cluster", "ring.size")


def written(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    spec, answer = tmp_path / "far.yaml", tmp_path / "plan.json"
    spec.write_text(SPEC.format(size=16, more=""))
    code = main(["plan", str(spec), "--json", str(answer), *options])
    return code, json.loads(answer.read_text()) if answer.exists() else {}


def test_the_command_predicts_for_a_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    code, there = written(tmp_path, "--on", "h100:2x8", "--timeline", str(trace))
    assert (code, there["on"]) == (0, "h100:2x8")
    assert "predicted for h100:2x8: NVIDIA H100" in capsys.readouterr().out
    events = [one for one in json.loads(trace.read_text()) if one["ph"] == "X"]
    assert {one["pid"] for one in events} == set(range(16))
    last = max(one["ts"] + one["dur"] for one in events) / 1e3
    assert last == pytest.approx(there["trials"][0]["predicted"]["time_ms"], rel=1e-3)
    _, slow = written(tmp_path, "--on", "h100:2x8", "--slow", "3:2", "--jitter", "0.01")
    quick = there["trials"][0]["predicted"]["time_ms"]
    assert slow["trials"][0]["predicted"]["time_ms"] > 1.2 * quick


def test_the_timeline_of_every_transport_is_written(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    for name in ("ulysses", "hybrid:2", "allgather"):
        chosen = ["--set", f"strategy.transport={name}", "--set", "ring.size=8", "--json", "-"]
        code, _ = written(tmp_path, "--on", "h100:2x8", "--timeline", str(trace), *chosen)
        assert code == 0
        names = {one["cat"] for one in json.loads(trace.read_text()) if one["ph"] == "X"}
        assert "compute" in names
        trace.unlink()


def test_a_core_of_the_table_is_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = written(tmp_path, "--on", "cpu:16x1", "--set", "strategy.transport=ring")
    assert code == 0
    assert "rank-hours" in capsys.readouterr().out
    assert made(size=16, on="cpu:16x1").device == "cpu"


def test_a_search_costs_about_its_budget() -> None:
    text = SPEC.format(size=8, more="search: {method: halving, budget: 0.25}").replace(
        '{transport: [ring, "double-ring:8"]}',
        "{partition: [contiguous, striped, zigzag, zigzag-token], "
        "transport: [ring, bidirectional, allgather, ulysses]}",
    )
    search, grid = parse(text), parse(text.replace("halving, budget: 0.25", "grid"))
    costs = [_totals(build(spec, parse_fleet("h100:8")), 1.0) for spec in (search, grid)]
    assert costs[0]["rank_hours"] == pytest.approx(costs[1]["rank_hours"] / 4)
    assert costs[0]["cost"] == pytest.approx(costs[1]["cost"] / 4)


def test_an_entry_of_ones_own_has_a_price(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    fields = table()["h100"].model_dump(mode="json") | {"price": 3.0}
    mine.write_text(json.dumps({"mine": fields}))
    _, found = written(tmp_path, "--on", f"{mine}:2x8")
    assert found["totals"]["cost"] == pytest.approx(3 * found["totals"]["rank_hours"])
    _, found = written(tmp_path, "--on", f"{mine}:2x8", "--price", "1")
    assert found["totals"]["cost"] == pytest.approx(found["totals"]["rank_hours"])
    # On CPUs attention in fp16 may be several times as fast as products.
    mine.write_text(json.dumps({"mine": fields | {"peak": fields["peak"] | {"bfloat16": 1e14}}}))
    assert written(tmp_path, "--on", f"{mine}:2x8")[0] == 0
    curve = fields["attention"][0]
    for wrong in (
        {"peak": fields["peak"] | {"bfloat16": 989}},  # TFLOP/s
        {"peak": {"bfloat16": -1}}, {"peak": {}}, {"peak": {"bf16": 1e12}}, {"call": math.inf},
        {"attention": [curve | {"dtype": "bf16"}]}, {"attention": [curve | {"rates": {"0": 1.0}}]},
    ):  # fmt: skip
        mine.write_text(json.dumps({"mine": fields | wrong}))
        assert written(tmp_path, "--on", f"{mine}:2x8")[0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", ""], "--on: hardware: got ''"),
        (["--on", "h1oo:8"], "--on: hardware: got 'h1oo'"),
        (["--on", "h100:2x8", "--slow", "3"], "--slow: got '3', expected RANK:FACTOR"),
        (["--on", "h100:2x8", "--slow", "3:0.5"], "--slow"),
        (["--on", "h100:2x8", "--jitter", "2"], "--jitter: got 2, expected a share from 0 to 1"),
        (["--slow", "3:2"], "--on"),
        (["--on", "h100:2x8", "--slow", "16:2"], "--slow: got rank 16, expected one of 0 to 15"),
    ],
)
def test_bad_options_end_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert written(tmp_path, *options) == (2, {})
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla T4", "h100"),
    ],
)
def test_gpus_are_found_by_their_model(model: str, name: str) -> None:
    assert gpus(model).name == name


@pytest.mark.parametrize("kind", ["train", "decode"])
def test_kinds_without_stragglers_refuse_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    spec = Path(__file__).parents[3] / "experiments" / f"{kind}.yaml"
    for option in (["--slow", "0:2"], ["--jitter", "0.1"]):
        assert main(["plan", str(spec), "--on", "h100:8", *option]) == 2
        assert f"kind {kind} is predicted without them" in capsys.readouterr().err
    assert main(["plan", str(spec), "--on", "h100:8", "--timeline", str(tmp_path / "t")]) == 2
    assert f"--timeline: kind {kind} has none" in capsys.readouterr().err


def test_two_documents_do_not_share_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written(tmp_path, "--on", "h100:2x8", "--timeline", "-")[0] == 0
    capsys.readouterr()
    spec = tmp_path / "far.yaml"
    assert main(["plan", str(spec), "--on", "h100:2x8", "--timeline", "-", "--json", "-"]) == 2
    assert "only one of them can be stdout" in capsys.readouterr().err


def test_the_longest_context_is_found_by_halving() -> None:
    text = """
version: 1
name: reach
kind: max-context
ring: {size: 2, device: cpu}
problem: {seq_len: [1k, 128k], dtype: float32}
training: {model: llama-tiny}
"""
    plan = build(parse(text))
    total = sum(trial.measuring_s for trial in plan.runnable)
    assert _totals(plan, None)["measuring_s"] == pytest.approx(
        total * (1 + math.log2(len(plan.runnable))) / len(plan.runnable)
    )
