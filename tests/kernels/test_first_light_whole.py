"""The first light as a whole, on a CPU: everything is compiled for a GPU, all stages run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringray_kernels.bench import first_light, problems
from tests.kernels.test_first_light import facts

ROOT = Path(__file__).resolve().parents[2]

COMPILE = """
from dataclasses import replace
from ringray_kernels.bench import stages
from ringray_kernels.bench.contenders import CONTENDERS
from ringray_kernels.bench.problems import Point

point = Point("full", 333, 64, 2, 2, direction="backward")
for name in ("ringray", "ringray-specialised"):
    found = stages.compile_calls(point, replace(CONTENDERS[name], backend="triton"), False)
    assert found["error"] is None, found
wrong = replace(CONTENDERS["ringray"], backend="triton")
print(stages.compile_calls(replace(point, head_dim=600), wrong, False)["error"])
"""


@pytest.mark.slow
def test_launches_are_compiled_without_a_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": "kernels", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)

    def run() -> set[Path]:
        done = subprocess.run(
            [sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, cwd=ROOT,
            env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "600" in done.stdout
        return set(tmp_path.rglob("*.cubin"))

    first = run()
    names = {path.stem for path in first}
    assert {"forward_kernel", "dq_kernel", "dkv_kernel", "delta_kernel"} < names
    assert run() == first


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "f"
    done = subprocess.run(
        [
            sys.executable, "-m", "ringray_kernels.bench", "--first-light", "--device", "cpu",
            "--json", str(path), "--only", "hops", "--only", "causal/131", "--minutes", "14",
            "--contenders", "ringray,ringray-specialised,ringray-fp8,sdpa-flash,flex",
        ],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ".:kernels"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = facts(path)
    outcomes = {one["stage"]: one["outcome"] for one in found if one.get("fact") == "stage"}
    skipped = outcomes.pop("memcheck")
    assert skipped == "done" or skipped.startswith("skipped")
    assert set(outcomes.values()) == {"done"}
    assert [*outcomes] == [s.name for s in first_light.STAGES if s.name != "memcheck"]
    named = {one.get("fact") for one in found}
    assert {"machine", "copy, GB/s read and written", "compiled"} <= named
    assert not any(one["error"] for one in found if one.get("fact") == "compiled")
    status = {(one["case"], one["contender"]): one["status"] for one in found if "fact" not in one}
    hops = "backward/causal/100/d64/h2x1/bf16/hops"
    assert status[hops, "ringray"] == status[hops, "ringray-specialised"] == "ok"
    assert status[hops.replace("backward", "forward"), "ringray-fp8"] == "ok"
    eight = [one for one in found if one.get("contender") == "ringray-fp8"]
    assert {"compiled", None} == {one.get("fact") for one in eight}
    for point in problems.points("quick", "cpu"):
        if point.mask == "causal":
            assert status[point.name, "ringray"] == status[point.name, "sdpa-flash"] == "ok"
    assert "targets (for an H200; this is cpu)" in done.stdout


# Python imports it when it starts.
HANGING = """
import threading
from ringray_kernels.bench.contenders import CONTENDERS, Ringray

class Hanging(Ringray):
    def prepare(self, point, inputs):
        return threading.Event().wait

CONTENDERS["ringray-atomic"] = Hanging()
"""


@pytest.mark.slow
def test_a_contender_that_hangs_costs_its_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{ROOT / 'kernels'}")
    monkeypatch.setattr(first_light.signal, "signal", lambda *_: None)  # this process keeps its own
    path = tmp_path / "f"
    options = ["--only", "forward/causal", "--contenders", "ringray,ringray-atomic,sdpa-flash"]
    every = (first_light.Stage("forward", 60, patience=15), first_light.SUMMARY)
    assert first_light.conduct(every, path, 10, options, "cpu") == 1
    found = facts(path)
    assert [one["outcome"] for one in found if "fact" in one] == ["done", "failed"]
    records = {one["contender"]: one for one in found if "fact" not in one}
    assert records["ringray"]["status"] == records["sdpa-flash"]["status"] == "ok"
    assert records["ringray-atomic"]["reason"] == (
        "no progress for 15 s while checking ringray-atomic"
    )
