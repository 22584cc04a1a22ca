"""Installed packages: the library alone or with the platform, in the same versions everywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from ringray.lab.cli import doctor

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXAMPLES = sorted(path.name for path in (ROOT / "experiments").glob("*.yaml"))


def pinned(name: str) -> str:
    (version,) = re.findall(
        rf"^{name}[<=]=(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    return str(version)


def test_torch_has_one_version_in_one_place() -> None:
    assert pinned("torch") == doctor.TRIED["torch"]
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
    assert shipped == {f"ringray/experiments/{name}" for name in EXAMPLES}
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
