"""The first light as a whole, on a CPU: all its stages run; what it launches is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringray_kernels.bench import first_light
from ringray_kernels.bench.contenders import CONTENDERS, is_ours
from tests.kernels.test_first_light import facts, outcomes

ROOT = Path(__file__).resolve().parents[2]

COMPILE = """
from dataclasses import replace
from experiments.precompile import compile_calls
from ringray_kernels.bench.contenders import CONTENDERS
from ringray_kernels.bench.problems import Point

point = Point("full", 333, 64, 2, 2, direction="backward")
for name in ("ringray", "ringray-portable"):
    error = compile_calls(point, CONTENDERS[name])
    assert error is None, error
print(compile_calls(replace(point, head_dim=600), CONTENDERS["ringray"]))
"""


@pytest.mark.slow
def test_launches_are_compiled_without_a_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": ".:kernels", "TRITON_CACHE_DIR": str(tmp_path)}
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
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles all for the GPU")
def test_a_call_is_compiled_for_each_of_ours() -> None:
    """As many as there are kinds of code, for a GPU that is not here."""
    from experiments.precompile import jobs

    calls = list(jobs())
    used = [contender for _, contender in calls]
    assert all(CONTENDERS[name] in used for name in CONTENDERS if is_ours(name))
    assert {point.form for point, _ in calls} == {"plain", "hops"}  # strides change no code


def whole(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the first light on a CPU, where no checkout is, of one case."""
    return subprocess.run(
        [
            sys.executable, "-m", "ringray_kernels.bench", "--first-light", "--device", "cpu",
            "--resume", "f", "--only", "forward/causal/131", "--contenders", "ringray,sdpa-flash",
            *options,
        ],
        capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )  # fmt: skip


@pytest.mark.slow
def test_the_whole_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "f"
    done = whole(tmp_path, "--minutes", "14", "--only", "hops")
    assert done.returncode == 0, done.stdout + done.stderr
    found = facts(path)
    ended = outcomes(path)
    assert {*ended} == {stage.name for row in first_light.STAGES for stage in row}
    for name in ("facts", "precompile", "tests", "memcheck", "profile"):
        assert ended.pop(name).startswith("skipped"), name
    assert set(ended.values()) == {"done"}
    records = {(one["case"], one["contender"]): one for one in found if "fact" not in one}
    for direction in ("forward", "backward"):  # checked, by the interpreter, and not timed
        record = records[f"{direction}/causal/100/d64/h2x1/bf16/hops", "ringray"]
        assert (record["status"], record["median_ms"]) == ("ok", None)
    for name in ("ringray", "sdpa-flash"):
        assert records["forward/causal/131/d64/h2/bf16", name]["median_ms"] > 0


@pytest.mark.slow
def test_a_run_that_measures_nothing_is_an_error(tmp_path: Path) -> None:
    # Long enough for the summary alone.
    done = whole(tmp_path, "--minutes", "1")
    assert done.returncode == 1
    assert outcomes(tmp_path / "f")["forward"] == "no time left"
    assert "nothing was measured" in done.stdout


# Python imports it when it starts.
HANGING = """
import threading
from ringray_kernels.bench.contenders import CONTENDERS, Ringray

class Hanging(Ringray):
    def prepare(self, point, inputs):
        return threading.Event().wait

CONTENDERS["ringray-portable"] = Hanging()
"""


@pytest.mark.slow
def test_a_contender_that_hangs_costs_its_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{ROOT / 'kernels'}")
    monkeypatch.setattr(first_light.signal, "signal", lambda *_: None)  # this process keeps its own
    path = tmp_path / "f"
    options = ["--only", "forward/causal", "--contenders", "ringray,ringray-portable,sdpa-flash"]
    every = [[first_light.Stage("forward", 60, patience=3)], [first_light.SUMMARY]]
    assert first_light.conduct(every, path, 10, options, "cpu") == 1
    found = facts(path)
    assert [one["outcome"] for one in found if "fact" in one] == ["done", "failed with exit code 1"]
    records = {one["contender"]: one for one in found if "fact" not in one}
    assert records["ringray"]["status"] == records["sdpa-flash"]["status"] == "ok"
    assert records["ringray-portable"]["reason"] == (
        "no progress for 12 s while checking ringray-portable"
    )
