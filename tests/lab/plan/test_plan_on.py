"""Plans for hardware that is not here, and plans that are too much for any."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ringray.base.errors import SpecError
from ringray.lab.cli import main
from ringray.lab.plan import limits
from ringray.lab.plan.plan import Plan, build
from ringray.lab.predict.hardware import parse_fleet
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
        ("h100:99999x8", "799,992 ranks, expected at most 65,536"),
        ("h100:2x8", r"ring\.size: got 64, but h100:2x8 has 16 ranks"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "h100:2x8", "--jitter", "2"], "--jitter: got 2, expected a share from 0 to 1"),
        (["--on", "h100:2x8", "--slow", "16:2"], "--slow: got rank 16, expected one of 0 to 15"),
    ],
)
def test_bad_options_end_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert written(tmp_path, *options) == (2, {})
    assert message in capsys.readouterr().err


# A few lines may ask for more than anybody has time for

HEAD = "version: 1\nname: p\nkind: latency\n"


def numbers(count: int, first: int = 1) -> str:
    return f"[{', '.join(map(str, range(first, first + count)))}]"


@pytest.mark.parametrize(
    ("text", "line", "field", "says"),
    [
        (
            f"problem:\n  seq_len: {numbers(1000, 64)}\n  batch: {numbers(10)}\n",
            5, "problem.seq_len", "10,000 points, a plan has at most 2,000",
        ),
        (
            "problem: {seq_len: " + numbers(20, 64) + "}\nstrategy:\n  transport: auto\n"
            "  partition: auto\nring: {size: " + numbers(100) + "}\n",
            6, "strategy.transport", "more than 2,000 points",
        ),
        (
            "problem:\n  seq_len: 1M\n  batch: " + numbers(1000) + "\n  documents: 60000\n",
            7, "problem.documents", "too many documents, a plan has at most 20,000,000",
        ),
        (
            "ring: {size: 512}\nproblem:\n  seq_len: 1M\n  documents: 10000\n",
            7, "problem.documents", "too many lengths, ranks and documents to plan",
        ),
    ],
)  # fmt: skip
def test_what_is_too_much_is_refused_at_once(
    text: str, line: int, field: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_POINTS", 2000)
    head = HEAD.replace("latency", "strategy-tune") if "transport: auto" in text else HEAD
    spec = parse(head + text, "p.yaml")
    began = time.process_time()
    with pytest.raises(SpecError, match=says) as caught:
        build(spec)
    assert time.process_time() - began < 30
    assert (caught.value.line, caught.value.field) == (line, field)


def test_inputs_that_fit_nowhere_are_pruned() -> None:
    text = "problem: {seq_len: [64, 2147483647], batch: 65536, heads: 1024, head_dim: 256}\n"
    made = build(parse(HEAD + text))
    assert [trial.pruned is None for trial in made.trials] == [True, False]
    reason = made.trials[1].pruned
    assert reason.field == "problem.seq_len"
    assert "TiB, more than 64" in reason.text
