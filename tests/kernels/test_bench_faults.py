"""The benchmark on a CPU where something hangs, or the device is lost: what was measured stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ringray_kernels.bench import __main__ as cli
from ringray_kernels.bench import contenders, measure, watchdog
from ringray_kernels.bench.contenders import CONTENDERS, Ringray
from tests.kernels.test_bench import Spoilt

HANGING = """
import sys, threading
from ringray_kernels.bench import __main__ as cli
from ringray_kernels.bench.contenders import CONTENDERS, Ringray

class Hanging(Ringray):
    def prepare(self, point, inputs):
        inner, calls = super().prepare(point, inputs), []

        def call():
            calls.append(None)
            if point.mask == "causal" and len(calls) > {fine}:
                threading.Event().wait()
            return inner()

        return call

CONTENDERS["hanging"] = Hanging()
sys.exit(cli.main([
    "--all", "--device", "cpu", "--only", "forward/full/96", "--only", "forward/causal/131",
    "--contenders", "hanging,ringray", "--patience", "{patience}", "--json", sys.argv[1],
]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("fine", "doing"), [(0, "checking"), (4, "timing")])
def test_a_hang_ends_the_run_and_costs_no_records(tmp_path: Path, fine: int, doing: str) -> None:
    path = tmp_path / "results.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", HANGING.format(fine=fine, patience=8), str(path)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "kernels"},
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.returncode == watchdog.EXIT_HUNG, done.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(line["case"].split("/")[1], line["contender"], line["status"]) for line in lines]
    assert found == [
        ("full", "hanging", "ok"), ("full", "ringray", "ok"), ("causal", "hanging", "failed"),
    ]  # fmt: skip
    assert lines[-1]["reason"] == f"no progress for 8 s while {doing} hanging"
    assert f"HUNG: forward/causal/131/d64/h2/bf16: no progress for 8 s while {doing}" in done.stdout


def test_a_lost_device_costs_no_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def free(device: torch.device, records: Any) -> None:
        found = list(records)
        if any(one.status == "failed" for one in found):
            raise measure.DeviceLost("illegal memory access", found)

    monkeypatch.setattr(measure, "free", free)
    monkeypatch.setitem(CONTENDERS, "wrong", Spoilt())
    monkeypatch.setitem(CONTENDERS, "broken", Spoilt(RuntimeError("a bug")))
    path = tmp_path / "results.jsonl"
    names = "flash-attn,wrong,broken,ringray"
    only = ["--quick", "--device", "cpu", "--only", "forward/window", "--json", str(path)]
    assert cli.main([*only, "--contenders", names]) == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["status"] for line in lines] == ["unsupported", "wrong", "failed"]
    assert "the device no longer responds" in capsys.readouterr().out


@pytest.mark.slow
def test_who_compiles_for_long_is_measured_after_all_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CONTENDERS, "risky", Ringray())
    monkeypatch.setattr(contenders, "LAST", ("risky",))
    path = tmp_path / "results.jsonl"
    names = "risky,ringray,ringray-portable"
    only = ["--quick", "--device", "cpu", "--only", "forward/", "--json", str(path)]
    assert cli.main([*only, "--contenders", names]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    who = [line["contender"] for line in lines if line["case"].startswith("forward")]
    assert who == ["ringray", "ringray-portable"] * 2 + ["risky"] * 2
    assert lines[-1]["contender"] == "risky"  # after the virtual rings as well
    table = capsys.readouterr().out.rpartition("error\n")[2].splitlines()
    assert [line.split()[0] for line in table[:2]] == ["ringray", "risky"]
