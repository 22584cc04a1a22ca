"""The benchmark on a CPU at tiny sizes: its checks, the whole flow, and what it must refuse."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringray_kernels import testing
from ringray_kernels.bench import __main__ as cli
from ringray_kernels.bench import (
    checks,
    contenders,
    machine,
    measure,
    problems,
    report,
    timing,
    virtual,
)  # fmt: skip
from ringray_kernels.bench.contenders import CONTENDERS, Ringray
from ringray_kernels.bench.problems import Point, VirtualPoint

CPU = torch.device("cpu")
FORWARD = Point("full", 96, 32, 2, 2)
BACKWARD = Point("full", 96, 32, 2, 2, direction="backward")
POINTS = [
    Point("causal", 131, 32, 4, 2, direction="backward"),
    Point("window", 131, 32, 2, 2, window=40),
    Point("documents", 131, 16, 2, 1, "float32", direction="backward"),
]


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


@pytest.mark.parametrize(
    ("error", "late", "status"),
    [
        (torch.cuda.OutOfMemoryError("no 7 GiB"), False, "oom"),
        (contenders.Unsupported("no such kernel"), False, "unsupported"),
        (RuntimeError("a bug"), True, "failed"),
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


def test_a_figure_above_the_peak_is_refused() -> None:
    record = measured(FORWARD, "ringray", peak=1e-9)["ringray"]
    assert record.status == "refused"
    assert record.median_ms is record.tflops is None
    assert "above the hardware's peak" in str(record.reason)
    assert machine.peak_tflops("NVIDIA H200", "bfloat16") == 989
    assert machine.peak_tflops("NVIDIA T4", "float16") is None


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


def test_the_command_measures_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    arguments = ["--quick", "--device", "cpu", "--json", str(path), "--only", "forward/causal"]
    names = "ringray,sdpa-flash,flash-attn"
    assert cli.main([*arguments, "--only", "zigzag/", "--contenders", names]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["contender"] for line in lines} == set(names.split(","))
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
    assert "unsupported: flash-attn: not installed" in shown
    assert "peak not known" in shown
    # Appended, and one contender alone.
    assert cli.main([*arguments, "--contenders", "sdpa-flash"]) == 0
    assert len(path.read_text().splitlines()) > len(lines)


def test_a_lost_device_costs_no_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def free(device: torch.device, records: Any) -> None:
        results = list(records)
        if any(result.status == "failed" for result in results):
            raise measure.DeviceLost("illegal memory access", results)

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


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--quick --all", "not allowed with"),
        ("--quick --device cpu --contenders ringray,x", "got x, expected some of ringray,"),
        ("--quick --device cpu --json /no/such/folder/f", "cannot write /no/such/folder/f"),
        ("--compile-only --target sm_1", "got sm_1, expected some of sm_80,"),
    ],
)
def test_wrong_command_lines(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert says in capsys.readouterr().err


def seen(point: Point) -> Tensor:
    bounds = point.boundaries
    return testing.visible(
        point.seq_len, causal=point.causal, window=point.window,
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
    )  # fmt: skip


def exact(point: Point, inputs: problems.Inputs) -> dict[str, Tensor]:
    """All results from the fp64 oracle."""
    results = testing.oracle(*inputs, seen(point), scale=point.scale)
    if point.direction == "forward":
        return {"out": results.out}
    return {name: getattr(results, name) for name in ("dq", "dk", "dv")}


@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.name)
def test_checks_accept_what_is_right_and_catch_one_percent(point: Point) -> None:
    inputs = problems.make_inputs(point, CPU, 0)
    right = checks.reference(point, inputs)
    results = exact(point, inputs)
    fine = checks.check(results, right, point.torch_dtype)
    assert fine.reason is None
    assert fine.share < 1e-3
    rounded = {name: x.to(point.torch_dtype) for name, x in results.items()}
    assert checks.check(rounded, right, point.torch_dtype).share < 0.5
    factor = 1.013 if point.dtype == "bfloat16" else 1.01
    for name, x in results.items():
        wrong = checks.check({**results, name: x * factor}, right, point.torch_dtype)
        assert wrong.reason is not None
        assert name in wrong.reason
        # One head of several, and the late rows only, which are small.
        for part in (x[:, -1], x[:, :, x.shape[2] // 2 :]):
            saved = part.clone()
            part *= 1.05
            assert checks.check(results, right, point.torch_dtype).reason
            part.copy_(saved)
    right_name, x = next(iter(results.items()))
    x[0, 0, 77, 3] = float("inf")  # neither a sampled head nor row
    verdict = checks.check(results, right, point.torch_dtype)
    assert verdict.reason == f"{right_name} is not finite everywhere"
