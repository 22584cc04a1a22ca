"""Cores and memory that control groups leave to a process, in trees that are made up."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from ringray.base import cgroups, provenance

GIB = 1 << 30
NONE = "9223372036854771712"  # what v1 says of memory without a limit


@pytest.mark.parametrize(
    ("own", "files", "cores", "memory"),
    [
        ("", {}, math.inf, math.inf),
        ("0::/\n", {"cpu.max": "150000 100000", "memory.max": f"{GIB}"}, 1.5, GIB),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/b/memory.max": "max"}, math.inf, math.inf),
        # The groups around it count, and those beside it do not.
        (
            "0::/a/b\n",
            {"a/cpu.max": "300000 100000", "a/b/cpu.max": "400000 100000",
             "c/cpu.max": "100000 100000", "a/memory.max": f"{2 * GIB}"},
            3.0, 2 * GIB,
        ),
        # A path of the host, of which the container sees its own group as the root.
        ("0::/docker/1f\n", {"cpu.max": "50000 100000", "memory.max": "5"}, 0.5, 5),
        ("0::/\n", {"cpu.max": "nonsense 0", "memory.max": ""}, math.inf, math.inf),
        (
            "4:cpu,cpuacct:/job\n7:memory:/job\n9:cpuset:/\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "250000",
             "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
             "memory/job/memory.limit_in_bytes": f"{GIB}"},
            2.5, GIB,
        ),
        (
            "4:cpuacct,cpu:/\n7:memory:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
             "memory/memory.limit_in_bytes": NONE},
            math.inf, float(NONE),
        ),
    ],
)  # fmt: skip
def test_limits_of_control_groups_count(
    own: str, files: dict[str, str], cores: float, memory: float,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    (tmp_path / "self").write_text(own)
    monkeypatch.setattr(cgroups, "ROOT", root)
    monkeypatch.setattr(cgroups, "SELF", tmp_path / "self")
    assert (cgroups.cores(), cgroups.memory()) == (cores, memory)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert provenance.cores() == max(1, int(min(usable or 1, cores)))
    assert provenance.memory_bytes() <= memory
    hardware = provenance.hardware.__wrapped__()
    assert (hardware["cores"], hardware["memory_bytes"]) == (
        provenance.cores(), provenance.memory_bytes()
    )  # fmt: skip


def test_a_system_without_control_groups_has_no_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "SELF", tmp_path / "missing")
    assert (cgroups.cores(), cgroups.memory()) == (math.inf, math.inf)
