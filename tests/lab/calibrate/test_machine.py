"""``ringray calibrate``: what ranks time, and the entry that follows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringray.base import provenance
from ringray.base.errors import UserError
from ringray.comm.ring import connect
from ringray.lab import cli
from ringray.lab.calibrate import machine, rank
from ringray.lab.calibrate.hops import HopTimer
from ringray.lab.calibrate.machine import Size
from ringray.lab.predict import cost_model, hardware
from ringray.lab.predict.hardware import Fleet, Hardware, Link
from ringray.lab.trial.config import TrialConfig

TINY = Size(
    rows=(32, 64, 96), head_rows=128, heads=4, hops=(1024, 1 << 18), seconds=0.2,
    rings=(("float32", 16, 4), ("float32", 64, 16)), dtypes=("float32", "bfloat16"),
    head_dims=(16,), slow={"bfloat16": 64},
)  # fmt: skip


def made() -> dict[int, dict[str, Any]]:
    """Samples of a machine on which every call reaches 1 GFLOP/s after 10 µs."""
    calls = [[1e-5 + machine._flops(case) / 1e9 for _ in range(3)] for case in TINY.alone()]
    products = {"float32": [1e10, 2e10], "bfloat16": [3e10, 4e10], "copy": [5e9, 5e9]}
    hops = [[1e-4 + size * 3e-9 for size in TINY.hops]]
    copying = [[5e-5 + size * 1e-9 for size in TINY.hops]]
    shared = {"alone": [[1.0, 2.0]], "busy": [[2.0, 4.0]]}
    return {
        1: {"attention": calls, "products": products, "rings": {"clock": [[2e-3]]}},
        2: {"hops": {"clock": hops, "cores": copying}, "shared": shared},
    }


def fields() -> dict[str, Any]:
    """The fields of an entry from those samples, but for what rings tell."""
    found = made()
    return {
        "title": "my machine", "ranks_per_node": 2, **machine._of_rank(TINY, found, cores=True),
        **machine._of_cores(TINY, found, 2),
    }  # fmt: skip


def test_the_entry_of_samples_is_what_they_were_made_of() -> None:
    entry = hardware.entry(fields(), "made")
    assert entry.call == pytest.approx(1e-5)
    for curve in entry.attention:
        assert list(curve.rates.values()) == pytest.approx([1e9] * len(curve.rates))
    assert {n for one in entry.attention for n in one.rates} == {32, 64, 96}
    assert max(n for one in entry.attention if one.dtype == "bfloat16" for n in one.rates) == 64
    assert entry.peak == {"float32": 2e10, "bfloat16": 4e10}
    assert entry.products == pytest.approx(0.75)
    assert entry.inner.latency == pytest.approx(1e-4, rel=0.05)
    assert entry.inner.bandwidth == pytest.approx(1 / 2e-9, rel=0.01), "beside the copying"
    assert entry.shared == 0.5
    assert entry.op == 1e-3
    assert entry.spread == pytest.approx(0)


def busy(entry: Hardware, configs: list[TrialConfig]) -> list[float]:
    """Core-seconds of a rank of each ring, whose messages take no time beside them."""
    link = Link(bandwidth=1e30, latency=0.0)
    alone = {"inner": link, "outer": link, "cores": hardware.RANKS}
    on = Fleet("made", entry.model_copy(update=alone), 1, hardware.RANKS)
    return [cost_model.predict(one, on).time_ms / 1e3 for one in configs]


def test_rings_tell_what_steps_messages_and_bytes_take() -> None:
    configs = machine._rings(TINY, 4)
    assert len({one.strategy.transport for one in configs}) > 3
    made_of = {"step": 3e-4, "message": 1e-4, "copying": 2e-9}
    entry = hardware.entry(fields() | made_of, "made")
    found = machine._handling(fields(), configs, np.array(busy(entry, configs)))
    assert {name: found[name] for name in made_of} == pytest.approx(made_of)
    assert found["spread"] == pytest.approx(0, abs=1e-6)
    without = hardware.entry(fields() | made_of | {"message": 0.0}, "made")
    cores = np.array(busy(without, configs)) * np.linspace(0.97, 1.03, len(configs))
    found = machine._handling(fields(), configs, cores)
    assert min(found.values()) >= 0
    assert 0 < found["spread"] < 0.1
    bare = hardware.entry(fields() | dict.fromkeys(made_of, 0.0), "made")
    cores = np.array(busy(bare, configs)) / 2  # alone it was slower: other work ran
    found = machine._handling(fields(), configs, cores)
    assert [found[name] for name in made_of] == [0.0] * 3
    assert found["spread"] == pytest.approx(1.0)


def test_a_rank_alone_times_its_parts() -> None:
    size = replace(TINY, dtypes=("float32",))
    cases = (*size.single(), *size.beside())
    parts = {"attention": 0.0, "products": 0.0, "rings": 0.0, "shared": 0.0}
    rings = tuple(config.as_dict() for config in machine._rings(size, 1))
    asked = rank.RankTask(parts, 0, 1, "", "cpu", cases, size.hops, rings)
    measurer = rank.RankMeasurer(asked)
    found = {part: getattr(measurer, part)() for part in parts}
    assert [len(taken) for taken in found["attention"]] == [3] * len(cases)
    assert np.min(found["attention"]) > 0
    assert set(found["products"]) == {"float32", "copy"}
    for rates in found["products"].values():
        assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    assert all(len(taken) == len(cases) for taken in found["shared"]["busy"])
    assert np.shape(found["rings"]["clock"]) == np.shape(found["rings"]["cores"]) == (4, 1)
    assert np.min(found["rings"]["clock"]) > 0


@pytest.mark.slow
def test_this_machine_is_measured_by_processes(home: Path) -> None:
    said: list[str] = []
    fields = machine.measure("cpu", said.append, replace(TINY, seconds=0.5))
    found = hardware.entry(fields, "measured")
    assert found.cores == provenance.hardware()["cores"]
    assert len(said) >= 2
    assert not home.exists(), "measuring writes nothing"


def test_a_rank_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'OSError: no room' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(machine.sys, "executable", str(program))
    with pytest.raises(UserError, match="a rank could not measure: OSError: no room"):
        machine._samples({"ranks": 1})


def test_a_machine_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = provenance.hardware() | {"gpus": []}
    monkeypatch.setattr(provenance, "hardware", lambda: there)
    assert cli.main(["calibrate", "--device", "cuda"]) == 2
    assert "no GPU of this machine works" in capsys.readouterr().err


def test_the_command_keeps_and_prints_what_was_measured(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = fields() | {"step": 2e-4, "message": 1e-4, "copying": 1e-9}
    monkeypatch.setattr(machine, "measure", lambda device, say: measured)
    file = tmp_path / "entry.json"
    assert cli.main(["calibrate", "--device", "cpu", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    for text in ("my machine: GFLOP/s", "in steps", "1.00", "200 µs a step", "beside others 50%"):
        assert text in printed
    assert json.loads(file.read_text())["local"]["title"] == "my machine"
    assert cli.main(["calibrate", "--device", "cpu", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["local"]["cores"] == 2
    assert len(list((home / "hardware").iterdir())) == 1


# How large the messages are that time a link, by a link whose clock is known

SIZES = machine.SIZES["cpu"].hops
SECONDS = 0.8


class KnownLink(HopTimer):
    """A link of so many bytes/s, whose sample number ``hiccup`` is late by half a second."""

    def __init__(self, bandwidth: float, latency: float, hiccup: int = -1) -> None:
        super().__init__(connect(None), torch.device("cpu"))
        self.bandwidth, self.latency, self.hiccup, self.spent = bandwidth, latency, hiccup, 0.0

    def sample(self, chunk: Tensor, count: int | None = None) -> tuple[float, float]:
        took = self.latency + chunk.nbytes / self.bandwidth + (0.5 if self.hiccup == 0 else 0.0)
        self.hiccup -= 1
        self.spent += took * (1 + (count or 1))
        return took, 0.0


@pytest.mark.parametrize("bandwidth", [1e5, 1e6, 24e6, 1.2e9, 5e10])
@pytest.mark.parametrize("latency", [1e-5, 1e-3])
def test_a_link_is_known_in_its_time(bandwidth: float, latency: float) -> None:
    link = KnownLink(bandwidth, latency)
    (small, least), (large, most) = link.ends(SIZES, SECONDS)
    intercept, byte = machine.line((small, large), [[least, most]])
    assert intercept == pytest.approx(latency + small / bandwidth, rel=1e-3)
    assert 1 / byte == pytest.approx(bandwidth * large / (large - small), rel=1e-6)
    assert link.spent < 2 * SECONDS, "rounds of 16 nodes end in half a minute"
    if bandwidth < 1e9:
        assert large / bandwidth > SECONDS / 16, "its time is that of its bytes"
    else:
        assert large == SIZES[-1]


@pytest.mark.parametrize("late", range(9))
def test_a_hop_that_is_late_changes_nothing(late: int) -> None:
    """Which is any but the last sample, of many hops."""
    usual, delayed = (KnownLink(24e6, 1e-4, hiccup).ends(SIZES, SECONDS) for hiccup in (-1, late))
    for (size, seconds), (other, others) in zip(usual, delayed, strict=True):
        assert (size, seconds) == (other, pytest.approx(others, rel=1e-3))
