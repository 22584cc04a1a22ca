"""``make setup`` and its lock; installed packages: the library alone or with the platform."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ringray.lab.cli import doctor

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXAMPLES = {path.name for path in (ROOT / "experiments").glob("*.yaml")}
TABLES = {f"lengths/{path.name}" for path in (ROOT / "experiments" / "lengths").iterdir()}
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
BUILDS = {"torch", "triton"}  # differ by platform, so that they have no hashes


def pins(text: str) -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)[<=]=(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


PINNED = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))


def test_torch_has_one_version_in_one_place() -> None:
    assert PINNED["torch"] == doctor.TRIED["torch"]
    files = ["Makefile", "cluster/Dockerfile", *(f"cluster/{n}.yaml" for n in ("aws", "gcp"))]
    for name in files:  # all of them install by constraints.txt
        text = (ROOT / name).read_text(encoding="utf-8")
        versions = re.findall(r"(?m)^[^#\n]*torch *(?:==|>=|~=) *(\d[\d.]*)", text)
        assert versions == [], name
    assert "-c /home/ray/ringray/constraints.txt" in (ROOT / "cluster/Dockerfile").read_text()


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # all that must be there
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]


def needed() -> set[str]:
    """Every package that ``ringray[dev]`` needs here, by what is installed."""
    waiting, names = [Requirement("ringray[dev]")], set()
    visited = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        names.add(name)
        for extra in {"", *requirement.extras}:
            if name in BUILDS or (name, extra) in visited:
                continue
            visited.add((name, extra))
            for line in metadata.requires(name) or ():
                inner = Requirement(line)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    waiting.append(inner)
    return names - {"ringray"}


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    """After a change of either: make lock."""
    assert PINNED.keys() >= BUILDS
    assert pins(LOCK) == {name: PINNED[name] for name in PINNED if name not in BUILDS}


def test_the_lock_has_all_that_is_needed_with_hashes() -> None:
    assert needed() - BUILDS <= pins(LOCK).keys()
    for block in re.split(r"\n(?=\S)", LOCK):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block
    assert "://" not in LOCK  # no index of whoever wrote it


# Takes the place of Python, and then of what it installs; says what it is asked for.
SCRIPT = """#!/bin/sh
echo "$(basename "$0") $*" >> "{log}"
case "$*" in
  *"-c import sys"*) exit 0;;
  *"-c import pip"*) exit 1;;
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/uv;;
  *"{fails}"*) exit 1;;
esac
"""


# Programs of the plug-ins, then torch and ringray.
OF_PIP = "python requirements.txt", "python constraints.txt"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    plugins = "tests/plugins/requirements.txt"
    (tmp_path / plugins).parent.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements.lock", plugins):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(clone: Path, fails: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs make with a Python that only notes what it is asked for, in ``log``."""
    python = clone / "python"
    python.write_text(SCRIPT.format(log=clone / "log", fails=fails))
    python.chmod(0o755)
    command = ["make", f"PYTHON={python}", *words]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("settings", "fails", "installers"),
    [
        ([], "nothing", ["python uv.txt", "uv requirements.lock", *OF_PIP]),
        (["UV="], "nothing", ["python without-uv.txt", *OF_PIP]),
        (
            [],
            "requirements.lock",
            [
                "python uv.txt", "uv requirements.lock", "python without-uv.txt", *OF_PIP
            ],
        ),
        (
            ["TORCH_BY=uv", "TORCH=torch==2.11.*"],
            "nothing",
            [
                "python uv.txt", "uv requirements.lock", "python requirements.txt",
                "uv constraints.txt",
            ],
        ),
    ],
)  # fmt: skip
def test_pip_installs_where_uv_cannot(
    clone: Path, settings: list[str], fails: str, installers: list[str]
) -> None:
    done = make(clone, fails, *settings, "setup")
    assert done.returncode == 0, done.stderr
    calls = [line for line in (clone / "log").read_text().splitlines() if " install " in line]
    assert [f"{line.split()[0]} {Path(line.split()[-1]).name}" for line in calls] == installers, (
        calls
    )
    assert all("--require-hashes" in line for line in calls[:-1])
    without = (clone / ".venv/without-uv.txt").read_text()
    assert pins(without) == {name: pin for name, pin in pins(LOCK).items() if name != "uv"}
    assert pins((clone / ".venv/uv.txt").read_text()).keys() == {"uv"}
    chosen = (clone / ".venv/constraints.txt").read_text()
    assert ("torch==2.11.*" in chosen.splitlines()) == (len(settings) == 2)
    assert len(re.findall(r"^torch", chosen, re.MULTILINE)) == 1


def test_a_failed_installation_does_not_count(clone: Path) -> None:
    assert make(clone, "constraints.txt", "setup").returncode
    assert not (clone / ".venv/.installed").exists()


def test_make_says_which_python_it_needs(clone: Path) -> None:
    old = clone / "python-of-old"
    old.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.8.1'\nexit 1\n")
    old.chmod(0o755)
    for python, says in [(str(old), "is Python 3.8.1"), ("no-such-python", "no 'no-such-python'")]:
        done = make(clone, "nothing", f"PYTHON={python}", "test")
        assert done.returncode != 0
        assert says in done.stderr
        assert "3.11" in done.stderr
    assert not (clone / ".venv").exists()


BARE = """
import sys
GONE = {
    "ray", "mlflow", "optuna", "yaml", "pydantic", "rich", "psutil", "altair", "vl_convert",
    "jinja2", "pynvml",
}  # fmt: skip
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
ATTEND = """
import torch, ringray, ringray.nn
from ringray.base import provenance
import torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
q = torch.randn(1, 2, 66, 16)
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
assert torch.allclose(ringray.ring_attention(q, q, q, causal=True), expected, atol=1e-5)
provenance.describe()
"""


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.run(
        [sys.executable, "-c", BARE + code, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_library_runs_without_the_platforms_packages(tmp_path: Path) -> None:
    done = python(ATTEND, RINGRAY_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    (tuned / "a.json").write_text("{}")
    done = python(ATTEND, RINGRAY_HOME=str(tmp_path))
    assert "tuned choices need pydantic: pip install 'ringray[lab]'" in done.stderr
    assert python(ATTEND, RINGRAY_HOME=str(tmp_path), RINGRAY_TUNED="0").returncode == 0


@pytest.mark.parametrize("command", ["run", "validate", "list", "doctor"])
def test_a_command_without_the_platform_says_how_to_get_it(command: str) -> None:
    spec = [] if command in ("list", "doctor") else ["experiments/quickstart.yaml"]
    done = python("from ringray.lab.cli import entry; entry()", command, *spec)
    assert done.returncode == 2
    assert "pip install 'ringray[lab]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_folder(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, **quiet)  # type: ignore[call-overload]
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {"ringray/py.typed", "ringray_kernels/py.typed"} <= inside
    page = (Path("ringray/lab/report/page") / f"page.{end}" for end in ("html", "css", "js"))
    assert {str(one) for one in page} <= inside
    shipped = {name for name in inside if name.startswith("ringray/experiments/")}
    assert shipped == {f"ringray/experiments/{name}" for name in EXAMPLES | TABLES}
    assert {name.partition("/")[0] for name in inside} == {
        "ringray", "ringray_kernels", f"ringray-{PROJECT['version']}.dist-info",
    }  # fmt: skip
    editable = "import sys, hatchling.build as b; b.build_editable(sys.argv[1])"  # as `make` does
    subprocess.run([sys.executable, "-c", editable, str(tmp_path / "e")], cwd=ROOT, **quiet)  # type: ignore[call-overload]
    fresh = tmp_path / "fresh"
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(fresh)]
    subprocess.run([sys.executable, *install, str(wheel)], **quiet)  # type: ignore[call-overload]
    checks = [
        ["-c", "import ringray, ringray_kernels as k; print(ringray.__file__, k.__file__)"],
        ["-m", "ringray", "validate", "experiments/quickstart.yaml"],
        ["-m", "ringray", "examples"],
        ["-m", "ringray", "examples", "quickstart"],
        ["-m", "ringray", "validate", "quickstart.yaml"],
        ["-m", "ringray", "validate", "experiments/packed.yaml"],
        ["-m", "ringray", "completion", "bash"],
        ["-m", "ringray", "--version"],
    ]
    for check in checks:
        done = subprocess.run(
            [sys.executable, *check], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(fresh)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if check[0] == "-c":
            assert done.stdout.count(str(fresh)) == 2
