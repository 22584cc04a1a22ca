"""The environment of a measurement: hardware, control groups and git; which changes of the source
make another one; the identity of two points."""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest

from ringray.base import cgroups, provenance
from ringray.base.source_digest import MEASURED, code_digest, measured_digest, syntax
from ringray.lab.kinds import KINDS
from ringray_kernels.backends import BACKENDS

CONFIG = {"seq_len": 64}
GIB = 1 << 30
NONE = "9223372036854771712"  # what v1 says of memory without a limit
WALK = "ringray/traffic/walk.py"
KERNEL = "ringray_kernels/backends/triton/forward.py"
UNMEASURED = ("ringray_kernels/bench/timing.py", "ringray/base/redaction.py")


def test_it_describes_this_machine() -> None:
    found = provenance.describe()
    assert set(found) == {
        "hardware", "os", "python", "versions", "git", "code", "kernels",
    }  # fmt: skip
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 1 << 20
    assert isinstance(found["hardware"]["gpus"], list)
    assert set(found["versions"]) == {"torch", "triton", "ray", "mlflow", "ringray"}
    assert len(found["code"]) == len(found["kernels"]) == 64
    assert os.uname().nodename not in str(found)


def test_a_point_is_its_config_kernels_hardware_and_versions() -> None:
    base = {
        "hardware": {"cpu": "a", "cores": 2, "memory_bytes": 8 << 30, "gpus": []},
        "versions": {"torch": "2", "triton": "3", "ringray": "1", "ray": "2", "mlflow": "3"},
        "kernels": "k",
        "code": "c",
        "git": {"commit": "1", "dirty": False},
    }
    point = provenance.point_digest(CONFIG, base)
    assert len(point) == 64
    same = [
        base | {"code": "other", "git": None, "os": "other"},
        base | {"versions": base["versions"] | {"mlflow": "4", "ray": "3"}},
        base | {"hardware": base["hardware"] | {"memory_bytes": (8 << 30) + 4096}},
    ]
    assert {provenance.point_digest(CONFIG, other) for other in same} == {point}
    different = [
        base | {"kernels": "other"},
        base | {"versions": base["versions"] | {"torch": "3"}},
        base | {"hardware": base["hardware"] | {"gpus": ["H100"]}},
        base | {"hardware": base["hardware"] | {"memory_bytes": 16 << 30}},
    ]
    points = {provenance.point_digest(CONFIG, other) for other in different}
    points |= {point, provenance.point_digest({"seq_len": 65}, base)}
    assert len(points) == 6


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not shutil.which("git"):
        pytest.skip("needs git")
    package = tmp_path / "ringray"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "_PACKAGE", package)
    return tmp_path


def _git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", *settings, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_git_names_the_commit_of_our_checkout(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provenance.git_state() is None
    _git(checkout, "init", "-q")
    assert provenance.git_state() is None, "no commit yet"
    _git(checkout, "add", ".")
    _git(checkout, "commit", "-q", "-m", "one")
    commit = _git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert provenance.git_state() == {"commit": commit, "dirty": False}
    (checkout / "untracked").write_text("")
    assert provenance.git_state() == {"commit": commit, "dirty": False}
    (checkout / "ringray" / "__init__.py").write_text("x = 1")
    assert provenance.git_state() == {"commit": commit, "dirty": True}


@pytest.mark.parametrize("broken", [None, "nvmlInit", "nvmlDeviceGetName"])
def test_gpus_are_named_by_the_driver(broken: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken one means that there is none."""

    def fail(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda i: i)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: f"NVIDIA {handle}")
    if broken is not None:
        monkeypatch.setattr(pynvml, broken, fail)
    gpus = provenance.hardware.__wrapped__()["gpus"]
    assert gpus == ([] if broken else ["NVIDIA 0", "NVIDIA 1"])


# Control groups, in trees that are made up


@pytest.mark.parametrize(
    ("own", "files", "cores", "memory"),
    [
        (None, {}, math.inf, math.inf),
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
    own: str | None, files: dict[str, str], cores: float, memory: float,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    if own is not None:
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


# Source


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, ...]:
    """Both packages with some of their files."""
    folders = {package.name: package for package in provenance.packages()}
    for name in (WALK, KERNEL, *UNMEASURED):
        package, _, inside = name.partition("/")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folders[package] / inside, tmp_path / name)
    return tmp_path / "ringray", tmp_path / "ringray_kernels"


@pytest.mark.parametrize("name", [WALK, KERNEL])
def test_only_other_syntax_makes_another_measurement(copies: tuple[Path, ...], name: str) -> None:
    path = copies[0].parent / name
    measured, code, text = measured_digest(copies), code_digest(copies), path.read_text()
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    assert docstring
    path.write_text("# A comment.\n\n" + text.replace(docstring, "Other words.", 1) + "\n# End\n")
    assert measured_digest(copies) == measured
    assert code_digest(copies) != code
    tree = ast.parse(text)
    path.write_text(ast.unparse(tree))  # the same syntax in another layout
    assert measured_digest(copies) == measured
    changed = next(node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    changed.ops[0] = ast.Lt() if isinstance(changed.ops[0], ast.LtE) else ast.LtE()
    path.write_text(ast.unparse(tree))
    assert measured_digest(copies) != measured


def test_only_files_with_which_ranks_measure_count(copies: tuple[Path, ...]) -> None:
    measured, code = measured_digest(copies), code_digest(copies)
    for name in UNMEASURED:
        path = copies[0].parent / name
        path.write_text(path.read_text() + "\nMORE = 1\n")
    assert measured_digest(copies) == measured
    assert code_digest(copies) != code
    (copies[0] / "traffic" / "new.py").write_text("")
    assert measured_digest(copies) != measured


def test_what_is_listed_exists_and_holds_every_kind_and_backend() -> None:
    folders = {folder.name: folder for folder in provenance.packages()}
    for package, parts in MEASURED.items():
        for part in parts:
            assert (folders[package] / part).exists(), f"{package}/{part}"
    measured = {f"ringray.{part.replace('/', '.')}" for part in MEASURED["ringray"]}
    for name in (*KINDS.values(), *BACKENDS.values()):
        where = name.partition(":")[0] if isinstance(name, str) else name.module
        assert where.startswith("ringray_kernels.") or where.rpartition(".")[0] in measured
        assert importlib.util.find_spec(where)


@pytest.mark.parametrize(
    ("source", "other", "same"),
    [
        ("def f(): return 1", 'def f():\n    """Words."""\n    return (1)  # one', True),
        ("class A: x = 'a' 'b'", "class A:\n  '''Words.'''\n  x = 'ab'", True),
        ("x[1:]", "x[:1]", False),
        ("x = '1'", "x = 1", False),
        ("def f(a, /): 0", "def f(a): 0", False),
    ],
)
def test_the_syntax_counts_and_nothing_else(source: str, other: str, same: bool) -> None:
    assert (syntax(source.encode()) == syntax(other.encode())) == same
