"""The first light: stages that hang or crash, what a resumed run skips, compilation ahead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringray_kernels
from experiments import yardsticks
from ringray_kernels.bench import __main__ as cli
from ringray_kernels.bench import first_light, machine, measure, problems, stages
from ringray_kernels.bench.contenders import CONTENDERS, LAST, Ringray, is_ours
from ringray_kernels.bench.first_light import SUMMARY, Stage
from ringray_kernels.bench.measure import Record
from ringray_kernels.defaults import CANDIDATES, PORTABLE

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
HERE = {"device": "cpu", "torch": "2.11", "cudnn": 9, "triton": "3.6", "source": "abc"}


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


def ended(process: int) -> bool:
    """Waits until init has seen a process end."""
    for _ in range(100):
        state = Path(f"/proc/{process}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_every_stage_has_work_and_the_last_one_sums_up() -> None:
    every = [stage for row in first_light.STAGES for stage in row]
    names = [stage.name for stage in every]
    ours = {stage.name for stage in every if not stage.command}
    assert ours | {"memcheck", "quick"} == set(stages.WORK)
    assert len(set(names)) == len(names)
    assert every[-1] is SUMMARY
    assert names.index("portable") < names.index("candidates") < names.index("forward")
    assert [{stage.name for stage in row} for row in first_light.STAGES if len(row) > 1] == [
        {"facts", "precompile"}, {"tests", "memcheck"},
    ]  # fmt: skip
    for stage in every:  # no file that has moved
        assert all((ROOT / name).exists() for name in stage.needs if "/" in name), stage


def test_a_stage_that_hangs_costs_its_own_time(tmp_path: Path, summary: Stage) -> None:
    pid = tmp_path / "pid"
    hanging = shell("hanging", f"trap '' INT; sleep 600 & echo $! > {pid}; wait; wait", 0.5)
    # Nothing is left of it, but what init has yet to see.
    script = f"while grep -s ^State /proc/$(cat {pid})/status | grep -qv Z; do sleep 0.1; done"
    code, found = conduct(tmp_path / "f", hanging, shell("next", script, 5), summary)
    assert code == 1  # what it would have said is not known
    assert found == {"hanging": "ended at its limit", "next": "done", "summary": "done"}


def test_what_ends_at_its_limit_may_say_what_it_has(tmp_path: Path, summary: Stage) -> None:
    script = "trap 'echo 2 failed; exit 1' INT; sleep 600 & wait"
    pair = [shell("tests", script, 0.5), shell("other", "echo fine")]
    path = tmp_path / "f"
    assert first_light.conduct([pair, [summary]], path, 1, [], "cpu") == 1
    assert outcomes(path) == {"tests": "ended at its limit", "other": "done", "summary": "done"}
    assert Path(f"{path}.tests.txt").read_text() == "2 failed\n"
    assert Path(f"{path}.other.txt").read_text() == "fine\n"


def test_stages_of_a_row_run_side_by_side(tmp_path: Path, summary: Stage) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # either end waits for the other
    pair = [shell("reads", f"read -r _ < {pipe}"), shell("writes", f"echo > {pipe}")]
    assert first_light.conduct([pair, [summary]], tmp_path / "f", 1, [], "cpu") == 0
    assert set(outcomes(tmp_path / "f").values()) == {"done"}


def test_time_is_kept_for_the_summary(tmp_path: Path, summary: Stage) -> None:
    slow = shell("slow", "sleep 600")
    _, found = conduct(tmp_path / "f", slow, shell("late", "exit 0"), summary, minutes=0.04)
    assert found == {"slow": "ended at its limit", "late": "no time left", "summary": "done"}


def test_a_summary_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    assert conduct(tmp_path / "f", SUMMARY, minutes=1e-9) == (1, {"summary": "no time left"})


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_run_ends_its_stages(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
import os, signal
from pathlib import Path
from ringray_kernels.bench.first_light import Stage, conduct
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does in the background
script = "trap '' INT; cd {tmp_path}; sleep 600 & echo $! > {{0}}.new; mv {{0}}.new {{0}}; wait"
pair = [Stage(name, 60, command=script.format(name)) for name in "ab"]
conduct([pair, pair], Path({str(tmp_path / "f")!r}), 5, [], "cpu")
"""
    running = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": "kernels"}, cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not all((tmp_path / name).exists() for name in "ab"):
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(number)
    assert running.wait(30) != 0
    assert all(ended(int((tmp_path / name).read_text())) for name in "ab")


def test_the_same_sources_are_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert measure.earlier(path, HERE) == []

    def add(contender: str, status: Any = "ok", **there: object) -> None:
        record = Record("a", contender, status, share=0.5, more={"sustained_ms": 2.0})
        with path.open("a") as file:
            file.write(record.json({**HERE, **there}, None) + "\n")

    def found() -> list[str]:
        return sorted(one.contender for one in measure.earlier(path, HERE))

    add("ringray", source="other")
    add("ringray", triton="3.9")
    add("ringray", device="NVIDIA H200")
    add("flex", torch="2.13")
    add("sdpa-cudnn", cudnn=8)
    add("ringray-x", "oom")
    path.open("a").write('{"fact": "stage"}\n{"case": "a", "contender": "ringr\n[1]\n')
    assert found() == []
    add("ringray", torch="2.13")
    add("ringray-x", "failed")
    add("flex", "wrong", source="other", triton="3.9")
    add("sdpa-cudnn", "unsupported")
    assert found() == ["flex", "ringray", "ringray-x"]
    flex = next(one for one in measure.earlier(path, HERE) if one.contender == "flex")
    assert flex == Record("a", "flex", "wrong", share=0.5, more={"sustained_ms": 2.0})
    # The latest counts, and infinity is a number again.
    worse = Record("a", "flex", "ok", share=float("inf"))
    path.open("a").write(worse.json(HERE, None) + "\n")
    assert next(one for one in measure.earlier(path, HERE) if one.contender == "flex") == worse


def test_a_resumed_run_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    monkeypatch.setattr(
        first_light, "conduct",
        lambda rows, path, minutes, options, device: max(
            cli.main(["--stage", one.name, "--resume", str(path), "--device", device, *options])
            for row in rows for one in row
        ),
    )  # fmt: skip
    only = ["--quick", "--device", "cpu", "--only", "forward/causal", "--resume", str(path)]
    assert cli.main([*only, "--contenders", "ringray,flash-attn"]) == 0
    capsys.readouterr()

    def measured() -> list[tuple[str, str]]:
        found = [one for one in facts(path) if "virtual" not in one["case"]]
        return [(one["contender"], one["status"]) for one in found]

    both = [("ringray", "ok"), ("flash-attn", "unsupported")]
    assert measured() == both
    called: list[None] = []
    prepare = Ringray.prepare
    monkeypatch.setattr(
        Ringray, "prepare", lambda self, *given: called.append(None) or prepare(self, *given)
    )
    assert cli.main([*only, "--contenders", "ringray,flash-attn"]) == 0
    assert measured() == both
    assert not called
    # Another contender is measured beside ours, whose figures stay.
    assert cli.main([*only, "--contenders", "ringray,sdpa-flash"]) == 0
    assert measured() == [*both, ("sdpa-flash", "ok")]
    assert called
    # One that was not installed may be by now.
    monkeypatch.setitem(CONTENDERS, "flash-attn", CONTENDERS["sdpa-flash"])
    assert cli.main([*only, "--contenders", "ringray,flash-attn"]) == 0
    assert measured()[3:] == [("flash-attn", "ok")]


def test_what_hung_is_not_measured_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    monkeypatch.setattr(Ringray, "prepare", lambda *_: pytest.fail("it hangs again"))
    environment = machine.environment(CPU)
    case = problems.points("quick", "cpu")[0].name
    path.write_text(Record(case, "ringray", "failed").json(environment, None) + "\n")
    only = ["--device", "cpu", "--only", "forward/causal", "--contenders", "ringray,sdpa-flash"]
    assert cli.main(["--stage", "forward", "--resume", str(path), *only]) == 0
    assert [one["contender"] for one in facts(path)] == ["ringray", "sdpa-flash"]


def test_a_first_light_begins_in_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(first_light, "conduct", lambda *args: given.append(args) or 0)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--first-light", "--only", "a", "--contenders", "ringray"]) == 0
    every, path, minutes, options, device = given.pop()
    assert every is first_light.STAGES
    assert minutes < 9
    assert (options, device) == (["--only", "a", "--contenders", "ringray"], "cuda")
    assert path.name.startswith("first-light-")
    used = tmp_path / "used"
    used.write_text("{}\n")
    assert cli.main(["--first-light", "--json", str(used)]) == 2
    assert f"--resume {used} goes on with it" in capsys.readouterr().err
    assert cli.main(["--first-light", "--resume", str(used)]) == 0
    assert cli.main(["--all", "--minutes", "3", "--resume", str(used)]) == 0
    (every,), (last,) = given[-1][0]
    assert (every.name, every.seconds, last) == ("all", 180, SUMMARY)


def test_smoke_points_have_every_kind() -> None:
    every = problems.smoke_points("cuda")
    assert len({point.name for point in every}) == len(every)
    kinds = {(point.mask, point.form, point.direction, point.head_dim) for point in every}
    for direction in ("forward", "backward"):
        for head_dim in (64, 128, 256):
            assert ("window", "strided", direction, head_dim) in kinds
            assert ("causal", "hops", direction, head_dim) in kinds
            assert ("documents", "plain", direction, head_dim) in kinds
    assert all(point.kv_heads < point.heads for point in every if point.form == "hops")
    strided = next(point for point in every if point.form == "strided")
    assert all(x.stride(1) < x.stride(2) for x in problems.make_inputs(strided, CPU, 0))


@pytest.mark.parametrize("point", problems.smoke_points("cpu"), ids=lambda point: point.name)
def test_forms_are_right_and_hops_are_calls(
    point: problems.Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    forward = ringray_kernels.forward

    def counted(*given: Any, **more: Any) -> Any:
        calls.append(None)
        return forward(*given, **more)

    monkeypatch.setattr(ringray_kernels, "forward", counted)
    (record,) = measure.measure(point, ["ringray"], CPU, lambda text: None, peak=None)
    assert record.status == "ok", record
    inputs = problems.make_inputs(point, CPU, 0)
    calls.clear()
    CONTENDERS["ringray"].prepare(point, inputs)()
    assert len(calls) == (3 if point.form == "hops" else 1)


def test_candidates_are_contenders_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(CONTENDERS)
    for head_dim, every in CANDIDATES.items():
        found = [f"ringray-{blocks}".replace(",", "+") for blocks in every]
        assert found == sorted(found, key=names.index)
        assert [CONTENDERS[name].blocks.get(head_dim) for name in found] == every  # type: ignore[attr-defined]
        assert max(map(names.index, found)) < names.index("sdpa-flash")
    assert not any(is_ours(name) for name in LAST)
    portable = CONTENDERS["ringray-portable"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    for head_dim, blocks in PORTABLE.items():
        for direction in ("forward", "backward"):
            point = problems.Point("full", 64, head_dim, direction=direction)  # type: ignore[arg-type]
            differs = blocks.forward if direction == "forward" else blocks.dkv or blocks.dq
            assert (portable.unsupported(point, gpu) is None) == (differs is not None)
    assert "16 bits" in str(portable.unsupported(problems.Point("full", 64, 80), gpu))
    assert portable.unsupported(problems.Point("full", 64), CPU) == "for Hopper GPUs only"


def test_ours_have_a_backend_on_tensors_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "CONTENDERS", dict(CONTENDERS))
    for device in (CPU, torch.device("cuda")):
        session: Any = SimpleNamespace(names=list(CONTENDERS), device=device)
        names = stages._ours(session)
        assert {"ringray", "ringray-portable"} <= set(names)
        for name in names:
            ours: Any = stages.CONTENDERS[name]
            assert ours.backend_on(torch.device("meta")) == "triton"
    assert CONTENDERS["ringray"] == Ringray()


def test_yardsticks_are_facts(tmp_path: Path) -> None:
    yardsticks.main(tmp_path / "f")
    first, *rates = facts(tmp_path / "f")
    assert (first["fact"], first["torch"]) == ("machine", torch.__version__)
    assert [one["fact"].partition(",")[0].partition(" ")[0] for one in rates] == ["product", "copy"]
    assert all(one["cold"] > 0 < one["sustained"] for one in rates)


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


def test_gpu_tests_are_collected_where_there_is_torch_alone() -> None:
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests/kernels/test_gpu.py::test_any_strides" in done.stdout
    assert "error" not in done.stdout


def test_make_gpu_is_one_command_that_fits_ten_minutes() -> None:
    def command(*given: str) -> str:
        done = subprocess.run(
            ["make", "-n", "gpu", *given], capture_output=True, text=True, check=True, cwd=ROOT
        )
        return " ".join(done.stdout.replace("\\\n", "").split())

    line = command()
    assert line.count("python") == 1
    assert "-m ringray_kernels.bench --first-light --resume gpu.jsonl --minutes" in line
    assert "530 / 60" in line
    assert command("GPU_SECONDS=240", "GPU_RESULTS=f") == (
        line.replace("530", "240").replace("gpu.jsonl", "f")
    )
