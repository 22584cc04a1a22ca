"""The benchmark on a CPU at tiny sizes: the whole flow, and what it must refuse."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringray_kernels import testing
from ringray_kernels.bench import __main__ as cli
from ringray_kernels.bench import (
    contenders,
    machine,
    measure,
    problems,
    report,
    timing,
    virtual,
)
from ringray_kernels.bench.contenders import CONTENDERS, Ringray
from ringray_kernels.bench.problems import Point, VirtualPoint

CPU = torch.device("cpu")
FORWARD = Point("full", 96, 32, 2, 2)
BACKWARD = Point("full", 96, 32, 2, 2, direction="backward")


def ignore(text: str) -> None:
    """Told what is being done."""


def measured(point: Point, *names: str, peak: float | None = None) -> dict[str, measure.Record]:
    found = measure.measure(point, names, CPU, ignore, peak=peak)
    return {record.contender: record for record in found}


@dataclass(frozen=True)
class Spoilt:
    """Ours, with a result that is wrong, or an error."""

    error: Exception | None = None
    late: bool = False
    deterministic: bool = False
    quantized: bool = False

    def unsupported(self, point: Point, device: torch.device) -> str | None:
        return None

    def prepare(self, point: Point, inputs: problems.Inputs) -> Any:
        inner = Ringray().prepare(point, inputs)
        calls = 0

        def call() -> dict[str, Tensor]:
            nonlocal calls
            calls += 1
            if self.error is not None and (calls > 1 or not self.late):
                raise self.error
            assert self.error is not None or calls == 1, "timed though wrong"
            factor = 1.05 if self.error is None else 1.0
            return {name: x * factor for name, x in inner().items()}

        return call


def test_who_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "spoilt", Spoilt())
    records = measured(BACKWARD, "spoilt", "ringray")
    assert records["spoilt"].status == "wrong"
    assert "dq is off by 5.0e-02, limit 1.2e-02" in str(records["spoilt"].reason)
    assert records["spoilt"].median_ms is None
    assert records["ringray"].status == "ok"
    lines = "\n".join(report.table(list(records.values())))
    assert "wrong: dq is off" in lines


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.cuda.OutOfMemoryError("no 7 GiB"), "oom"),
        (contenders.Unsupported("no such kernel"), "unsupported"),
        (RuntimeError("a bug"), "failed"),
    ],
)
def test_who_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: str, late: bool
) -> None:
    monkeypatch.setitem(CONTENDERS, "spoilt", Spoilt(error, late))
    records = measured(FORWARD, "ringray", "spoilt")
    assert records["spoilt"].status == status
    assert str(error) in str(records["spoilt"].reason)
    assert records["ringray"].status == "ok"


def test_no_memory_for_the_inputs_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object) -> Any:
        raise torch.cuda.OutOfMemoryError("too long")

    monkeypatch.setattr(measure, "make_sets", no)
    assert measured(FORWARD, "ringray")["ringray"].status == "oom"


def test_a_figure_above_the_peak_is_refused() -> None:
    record = measured(FORWARD, "ringray", peak=1e-9)["ringray"]
    assert record.status == "refused"
    assert record.median_ms is record.tflops is None
    assert "above the hardware's peak" in str(record.reason)
    assert machine.peak_tflops("NVIDIA H200", "bfloat16") == 989
    assert machine.peak_tflops("NVIDIA H100 80GB HBM3", "float32") == 494.5
    assert machine.peak_tflops("NVIDIA T4", "float16") is None
    quick = timing.Timing(1.0, 0.5, 1.5, 1)
    assert timing.above_peak(600e9, quick, 989) == (
        "1200 TFLOP/s is above the hardware's peak of 989"
    )
    assert timing.above_peak(480e9, quick, 989) is None
    assert timing.above_peak(1e30, quick, None) is None


@dataclass(frozen=True)
class Drifting:
    """Ours, with results that change after some calls, as those of a race."""

    deterministic: bool
    quantized: bool = False

    def unsupported(self, point: Point, device: torch.device) -> str | None:
        return None

    def prepare(self, point: Point, inputs: problems.Inputs) -> Any:
        inner, calls = Ringray().prepare(point, inputs), []

        def call() -> dict[str, Tensor]:
            calls.append(None)
            results = inner()
            results["dk"][0, 0, 0, 0] += len(calls) > 5
            return results

        return call


def test_results_that_change_while_they_are_timed_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CONTENDERS, "drifting", Drifting(True))
    monkeypatch.setitem(CONTENDERS, "undetermined", Drifting(False))
    records = measured(BACKWARD, "drifting", "undetermined", "ringray")
    assert records["drifting"].status == "wrong"
    assert records["drifting"].reason == "dk changed between calls"
    assert records["drifting"].median_ms is None
    assert records["undetermined"].status == records["ringray"].status == "ok"
    assert Ringray().deterministic


def test_a_burst_follows_the_samples() -> None:
    more = measured(FORWARD, "ringray")["ringray"].more
    assert more["sustained_tflops"] == pytest.approx(FORWARD.flops / more["sustained_ms"] / 1e9)
    h200 = torch.device("cuda")
    assert measure.effort(Point("causal", 16384), h200).burst_ms == 300
    assert measure.effort(Point("causal", 4096), h200).burst_ms == 0


def test_contenders_take_turns_with_fixed_counts() -> None:
    log: list[str] = []
    calls = {name: [lambda n=name: log.append(n)] for name in "abc"}
    found = timing.interleaved(calls, CPU, timing.Effort(rounds=6, sample_ms=0.0))
    assert all(isinstance(one, timing.Timing) and one.calls == 1 for one in found.values())
    assert "".join(log[-18:]) == "abcbcacababcbcacab"
    assert timing.Timing.of([10.0, 0.0], 3) == timing.Timing(5.0, 2.0, 8.0, 3)


@pytest.mark.parametrize("partition", problems.PARTITIONS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_virtual_ring_computes_the_whole(partition: str, ranks: int) -> None:
    point = VirtualPoint(partition, ranks, 64, 2, 16)
    inputs = problems.make_inputs(point.whole, CPU, 0)
    ring = virtual.VirtualRing(point, inputs, "aten")
    clock = timing.Clock(CPU)
    ring.forward(clock)
    hops = len(clock.milliseconds())
    # Contiguous causal ranks see only those before them.
    assert hops == (ranks * (ranks + 1) // 2 if partition == "contiguous" else ranks * ranks)
    ring.prepare_backward()
    ring.backward(clock)
    assert len(clock.milliseconds()) == hops
    want = testing.oracle(*inputs, testing.visible(64, causal=True), scale=point.whole.scale)
    got = {**ring.assembled("forward"), **ring.assembled("backward")}
    for name, x in got.items():
        assert x.dtype == torch.bfloat16
        error = (x.double() - getattr(want, name)).norm() / getattr(want, name).norm()
        assert float(error) < 6e-3, name


def test_virtual_records_and_a_wrong_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = virtual.VirtualBench(CPU, None, rounds=2)
    point = VirtualPoint("zigzag", 2, 64, 2, 16)
    forward, backward = bench.measure(point, ignore)
    for record in (forward, backward):
        assert record.status == "ok"
        assert record.median_ms == pytest.approx(sum(record.more["ranks_ms"]))
        assert record.more["overhead"] == pytest.approx(record.median_ms / record.more["whole_ms"])
        assert [len(hops) for hops in record.more["hops_ms"]] == [2, 2]
        assert "1/N 0.5000" in report.ring_line(record)
    assert {r.status for r in virtual.VirtualBench(CPU, 1e-9, 1).measure(point, ignore)} == {
        "refused"
    }
    monkeypatch.setattr(virtual.VirtualRing, "prepare_backward", lambda ring: None)
    ok, failed = bench.measure(point, ignore)
    assert (ok.status, failed.status) == ("ok", "failed")
    monkeypatch.undo()
    assembled = virtual.VirtualRing.assembled
    monkeypatch.setattr(
        virtual.VirtualRing, "assembled",
        lambda ring, way: {n: x * 1.05 for n, x in assembled(ring, way).items()},
    )  # fmt: skip
    assert [r.status for r in bench.measure(point, ignore)] == ["wrong", "wrong"]


def test_the_command_measures_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    arguments = ["--quick", "--device", "cpu", "--json", str(path)]
    assert cli.main([*arguments, "--only", "forward/causal", "--only", "zigzag/"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["contender"] for line in lines} == set(CONTENDERS)
    assert {line["case"].partition("/")[0] for line in lines} == {"forward", "virtual"}
    for line in lines:
        assert line["environment"]["torch"] == torch.__version__
        assert line["environment"]["source"]
        if line["status"] == "ok":
            spread = [line[name] for name in ("p20_ms", "p80_ms")]
            assert all(spread), line
            assert [0, *spread] == sorted([0, *spread])
            assert line["tflops"] == pytest.approx(line["flops"] / line["median_ms"] / 1e9)
            assert 0 < line["share"] <= 1
        else:
            assert line["reason"]
    shown = capsys.readouterr().out
    assert "x ours" in shown
    assert "unsupported: flash-attn, flash-attn-3: not installed" in shown
    assert "peak not known" in shown
    # Appended, and one contender alone.
    assert cli.main([*arguments, "--only", "forward/causal", "--contenders", "ringray"]) == 0
    assert len(path.read_text().splitlines()) == len(lines) + 1 + 2 * len(problems.PARTITIONS)


def test_time_can_be_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--all", "--device", "cpu", "--minutes", "1e-9"]) == 1
    shown = capsys.readouterr().out
    assert "not started within 1e-09 minutes: forward/" in shown
    assert "nothing was measured" in shown


def test_the_exit_code_tells_of_wrong_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--quick", "--device", "cpu", "--only", "forward/window"]
    monkeypatch.setitem(CONTENDERS, "other", Spoilt())
    assert cli.main([*only, "--contenders", "other,ringray"]) == 0
    monkeypatch.setitem(CONTENDERS, "ringray-spoilt", Spoilt())
    assert cli.main([*only, "--contenders", "ringray-spoilt,ringray"]) == 1
    assert "failures:\nforward/window40" in capsys.readouterr().out

    def lost(*_: object, **__: object) -> Any:
        raise measure.DeviceLost("illegal memory access")

    monkeypatch.setattr(measure, "measure", lost)
    assert cli.main(only) == 1
    assert "the device no longer responds" in capsys.readouterr().out


def test_the_device_is_busy_while_the_host_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return 6.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    calls = [lambda: log.append("call")]
    assert timing.sample(calls, 3, 0, torch.device("cuda")) == 2.0
    assert log == ["wait", "sleep", "record", "call", "call", "call", "record"]


WRONG = {
    "": "--first-light, --quick, --all, --list or --compile-only",
    "--quick --all": "not allowed with",
    "--fast": "unrecognized arguments: --fast",
    "--quick --device tpu": "invalid choice",
    "--quick --device cpu --only nothing": "no case has nothing in its name, see --list",
    "--quick --device cpu --contenders ringray,x": "got x, expected some of ringray,",
    "--quick --device cpu --json /no/such/folder/f": "cannot write /no/such/folder/f",
    "--quick --resume /no/such/folder/f": "cannot write /no/such/folder/f",
    "--quick --json f --resume f": "--resume: not allowed with argument --json",
    "--first-light --stage all": "not allowed with",
    "--stage any --device cpu": "--stage: got any, expected some of portable,",
    "--quick --minutes 0": "got 0, expected more than 0",
    "--quick --patience 0": "--patience: got 0, expected more than 0",
    "--quick --target sm_90": "go with --compile-only",
    "--compile-only --head-dim 300": "got 300, expected 1 to 256",
    "--compile-only --target sm_1": "got sm_1, expected some of sm_80,",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_command_lines(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    shown = capsys.readouterr().err
    assert WRONG[line] in shown
    assert "Traceback" not in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--quick"]) == 2
    assert "no GPU here. --compile-only" in capsys.readouterr().err


def test_compile_only_is_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ringray_kernels.inspect import report

    given: list[object] = []
    monkeypatch.setattr(report, "main", lambda *args: given.append(args) or 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tmp_path / "f"
    line = ["--compile-only", "--target", "sm_90", "sm_80", "--head-dim", "64", "--json", str(path)]
    assert cli.main(line) == 0
    assert given == [(["sm_90", "sm_80"], [64], path)]
    assert "TRITON_INTERPRET" not in os.environ


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert "forward/causal/16k/d128/h16/bf16  (quick too)" in shown
    assert "virtual/zigzag/n8/forward/causal/128k/d128/h8/bf16  (quick too)" in shown
    assert all(name in shown for name in CONTENDERS)
