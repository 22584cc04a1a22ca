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


def measured(point: Point, *names: str, peak: float | None = None) -> dict[str, measure.Record]:
    records = measure.measure(point, names, CPU, str, peak=peak)
    return {record.contender: record for record in records}


@dataclass(frozen=True)
class Spoilt:
    """Ours, with an error or with a result that is wrong."""

    error: Exception | None
    deterministic: bool = False
    quantized: bool = False

    def unsupported(self, point: Point, device: torch.device) -> str | None:
        return None

    def prepare(self, point: Point, inputs: problems.Inputs) -> Any:
        inner = Ringray().prepare(point, inputs)

        def call() -> dict[str, Tensor]:
            if self.error is not None:
                raise self.error
            return {name: 1.05 * x for name, x in inner().items()}

        return call


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (None, "wrong", "dq is off by 5.0e-02, limit 1.2e-02"),
        (torch.cuda.OutOfMemoryError("no 7 GiB"), "oom", "no 7 GiB"),
        (contenders.Unsupported("no such kernel"), "unsupported", "no such kernel"),
        (RuntimeError("a bug"), "failed", "a bug"),
    ],
)
def test_who_is_wrong_or_fails_is_not_timed_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, status: str, says: str
) -> None:
    monkeypatch.setitem(CONTENDERS, "spoilt", Spoilt(error))
    records = measured(BACKWARD, "spoilt", "ringray")
    assert (records["spoilt"].status, records["spoilt"].median_ms) == (status, None)
    assert says in str(records["spoilt"].reason)
    assert records["ringray"].status == "ok"


def test_a_figure_above_the_peak_is_refused() -> None:
    record = measured(FORWARD, "ringray", peak=1e-9)["ringray"]
    assert record.status == "refused"
    assert record.median_ms is record.tflops is None
    assert "above the hardware's peak" in str(record.reason)
    assert machine.peak_tflops("NVIDIA H200", "bfloat16") == 989
    assert machine.peak_tflops("NVIDIA T4", "float16") is None


@pytest.mark.parametrize("partition", [*problems.PARTITIONS, "balanced"])
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


@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.name)
def test_checks_accept_what_is_right_and_catch_little_errors(point: Point) -> None:
    inputs = problems.make_inputs(point, CPU, 0)
    right = checks.reference(point, inputs)
    seen = testing.visible(
        point.seq_len, causal=point.causal, window=point.window,
        cu_seqlens=None if point.boundaries is None else torch.tensor(point.boundaries),
    )  # fmt: skip
    exact = testing.oracle(*inputs, seen, scale=point.scale)
    names = ("out",) if point.direction == "forward" else ("dq", "dk", "dv")
    results = {name: getattr(exact, name) for name in names}
    assert checks.check(results, right, point.torch_dtype).reason is None
    rounded = {name: x.to(point.torch_dtype) for name, x in results.items()}
    assert checks.check(rounded, right, point.torch_dtype).share < 0.5
    for name, x in results.items():
        wrong = checks.check({**results, name: x * 1.013}, right, point.torch_dtype)
        assert name in str(wrong.reason)
        late = x.clone()
        late[:, :, x.shape[2] // 2 :] *= 1.05  # which are small
        assert checks.check({**results, name: late}, right, point.torch_dtype).reason
    results[names[0]][0, 0, 77, 3] = float("inf")  # neither a sampled head nor row
    verdict = checks.check(results, right, point.torch_dtype)
    assert verdict.reason == f"{names[0]} is not finite everywhere"
