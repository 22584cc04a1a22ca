"""The first light: stages that hang or crash, and what a resumed run skips."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringray_kernels.bench import first_light, stages
from ringray_kernels.bench.first_light import SUMMARY, Stage

ROOT = Path(__file__).resolve().parents[2]


def facts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcomes(path: Path) -> dict[str, str]:
    """Returns the outcome of each stage."""
    every = facts(path) if path.exists() else []
    return {one["stage"]: one["outcome"] for one in every if one.get("fact") == "stage"}


def conduct(path: Path, *every: Stage, minutes: float = 1.0) -> tuple[int, dict[str, str]]:
    """Returns the exit code and the outcome of each stage, one after the other."""
    path.touch()
    code = first_light.conduct([[one] for one in every], path, minutes, [], "cpu")
    return code, outcomes(path)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(first_light, "_CPU_SLOWER", 1)
    monkeypatch.setattr(first_light, "_LEAST_S", 0.01)
    monkeypatch.setattr(first_light, "_INTERRUPT_S", 0.2)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def shell(name: str, script: str, seconds: float = 30) -> Stage:
    """A stage that is a shell script in place of a process of ours."""
    return Stage(name, seconds, command=script)


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(first_light, "SUMMARY", shell("summary", "exit 0", 1.0))
    return first_light.SUMMARY


def test_every_stage_has_work_and_the_last_one_sums_up() -> None:
    every = [stage for row in first_light.STAGES for stage in row]
    ours = {stage.name for stage in every if not stage.command}
    assert ours | {"memcheck", "quick"} == set(stages.WORK)
    assert every[-1] is SUMMARY
    for stage in every:  # no file that has moved
        assert all((ROOT / name).exists() for name in stage.needs if "/" in name), stage


def test_a_stage_that_hangs_costs_its_own_time(tmp_path: Path, summary: Stage) -> None:
    pid = tmp_path / "pid"
    hanging = shell("hanging", f"trap '' INT; sleep 600 & echo $! > {pid}; wait; wait", 3)
    # Nothing is left of it, but what init has yet to see.
    script = f"while grep -s ^State /proc/$(cat {pid})/status | grep -qv Z; do sleep 0.1; done"
    code, endings = conduct(tmp_path / "f", hanging, shell("next", script, 30), summary)
    assert code == 1  # what it would have said is not known
    assert endings == {"hanging": "ended at its limit", "next": "done", "summary": "done"}


def test_outcomes_of_stages(
    tmp_path: Path, summary: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    for name, script in (("hung", f"echo >> {path}.n; exit 3"), ("usage", "exit 2")):
        (tmp_path / name).write_text(script)
    monkeypatch.setattr(first_light, "_BENCH", ("sh", "-c", 'sh "$0/$2"', str(tmp_path)))
    code, found = conduct(
        path, Stage("absent", 9, needs=("sh", "no-such-tool")), shell("early", "kill -ABRT $$"),
        shell("errors", "exit 2"), Stage("hung", 9), shell("fine", "exit 0"), summary,
    )  # fmt: skip
    assert code == 1
    assert found == {
        "absent": "skipped, no-such-tool is not here", "early": "failed with SIGABRT",
        "errors": "failed with exit code 2", "hung": "hung 3 times",
        "fine": "done", "summary": "done",
    }  # fmt: skip
    assert len(Path(f"{path}.n").read_text()) == 3
    # A wrong machine or command line is wrong for all; failures in the summary count.
    assert conduct(tmp_path / "g", Stage("usage", 9), summary) == (2, {})
    first_light.SUMMARY = shell("summary", "exit 1", 1.0)
    assert conduct(tmp_path / "h", first_light.SUMMARY)[0] == 1


def test_what_was_done_is_not_done_again(
    tmp_path: Path, summary: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, runs = tmp_path / "f", tmp_path / "runs"
    once = Stage("once", 9, command=f"echo >> {runs}; test $(wc -l < {runs}) != 1", once=True)
    assert conduct(path, once, summary)[0] == 1  # failed: to be done again
    assert conduct(path, once, summary)[0] == 0
    assert conduct(path, once, summary) == (0, {"once": "done before", "summary": "done"})
    assert len(runs.read_text()) == 2
    monkeypatch.setattr(first_light, "source_digest", lambda *_: "other")
    assert conduct(path, once, summary) == (0, {"once": "done", "summary": "done"})


COLLECT = """
import importlib.abc, sys
import pytest

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "mlflow", "pydantic", "yaml", "optuna", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "-m", "gpu", "tests"]))
"""


@pytest.mark.slow
def test_gpu_tests_are_collected_where_there_is_torch_alone() -> None:
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests/kernels/test_gpu.py::test_any_strides" in done.stdout
    assert "error" not in done.stdout


@pytest.mark.slow
def test_the_whole_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "f"
    done = subprocess.run(
        [
            sys.executable, "-m", "ringray_kernels.bench", "--first-light", "--device", "cpu",
            "--resume", "f", "--only", "forward/causal/131", "--only", "hops", "--minutes", "14",
            "--contenders", "ringray,sdpa-flash",
        ],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    written = facts(path)
    ended = outcomes(path)
    assert {*ended} == {stage.name for row in first_light.STAGES for stage in row}
    for name in ("facts", "precompile", "tests", "memcheck", "profile"):
        assert ended.pop(name).startswith("skipped"), name
    assert set(ended.values()) == {"done"}
    records = {(line["case"], line["contender"]): line for line in written if "fact" not in line}
    for direction in ("forward", "backward"):  # checked, by the interpreter, and not timed
        record = records[f"{direction}/causal/100/d64/h2x1/bf16/hops", "ringray"]
        assert (record["status"], record["median_ms"]) == ("ok", None)
    for name in ("ringray", "sdpa-flash"):
        assert records["forward/causal/131/d64/h2/bf16", name]["median_ms"] > 0
