"""Examples of the documentation run and do what their pages say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"


def run(*command: object) -> str:
    """Output of a python command in a process of its own, that sees this checkout."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("seq_len", [4097, *exhaustive(3)])
def test_the_first_snippet_of_the_readme(tmp_path: Path, seq_len: int) -> None:
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert snippet is not None
    (tmp_path / "attend.py").write_text(snippet[1].replace("4097", str(seq_len)))
    said = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, tmp_path / "attend.py"
    )
    held = rf"held \(1, 8, {-(-seq_len // 4) * 2}, 64\)"
    # Two ranks may write at once, a line's end after both.
    differences = re.findall(rf"{held}; largest difference from SDPA: (\de[+-]\d\d)", said)
    assert len(differences) == 2
    assert all(float(difference) < 2e-5 for difference in differences)


@pytest.mark.slow
def test_torchrun_training_has_the_same_curve_on_one_rank_and_two() -> None:
    curves = []
    for ranks in (1, 2):
        said = run(
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks,
            EXAMPLES / "torchrun_training.py",
        )  # fmt: skip
        curves.append(
            [float(x) for x in re.findall(r"^step +\d+  loss (\S+)$", said, re.MULTILINE)]
        )
    one, two = curves
    assert len(one) == len(two) == 20
    assert one[-1] < one[0] / 10
    torch.testing.assert_close(one, two, atol=2e-3, rtol=2e-3)


@pytest.mark.exhaustive
def test_ray_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray's token and settings
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # it makes its own
        monkeypatch.delenv(name, raising=False)
    errors = re.findall(r"^rank \d: (\S+) from SDPA", run(EXAMPLES / "ray_actors.py"), re.MULTILINE)
    assert len(errors) == 2
    assert all(float(error) < 1e-5 for error in errors)


@pytest.mark.exhaustive
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "RINGRAY_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    book = json.loads((EXAMPLES / "results.ipynb").read_text("utf-8"))
    cells = ["".join(one["source"]) for one in book["cells"] if one["cell_type"] == "code"]
    assert len(cells) == 4
    (tmp_path / "cells.py").write_text(
        "\n".join([*cells, "print(len(frame), set(frame.status), summary.counts)"])
    )
    said = run(tmp_path / "cells.py")
    assert "[4/4] zigzag 256  ok" in said
    assert re.search(r"^256 +\d+\.\d+ +\d+\.\d+$", said, re.MULTILINE)
    assert said.endswith("4 {'ok'} {'ok': 4}\n")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_that_starts_ray_asks_for_a_token(path: Path) -> None:
    text = path.read_text()
    if "ray.init(" in text:
        mode = text.index('os.environ.setdefault("RAY_AUTH_MODE", "token")')
        token = text.index('os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))')
        imported = re.search(r"^ *import ray$", text, re.MULTILINE)
        assert imported is not None
        assert max(mode, token) < imported.start()
        assert "include_dashboard=False" in text
    else:
        assert "import ray\n" not in text


def page(name: str, least: int, rank: int, size: int) -> None:
    """Every python block of a page, in order; those of Hugging Face have their own tests."""
    text, _, _ = (ROOT / "docs" / name).read_text("utf-8").partition("## Hugging Face")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= least
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), names)


# Pages, and the blocks that they have at least.
RUN = [("models.md", 8), ("coming-from.md", 4), ("training.md", 1), ("ten-minutes.md", 1)]


@pytest.mark.parametrize(("name", "least"), RUN)
def test_pages_run(name: str, least: int) -> None:
    on_ring(2, (partial(page, name, least),))
