"""Examples and snippets of the documentation run and do what their pages say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(home: Path, *command: object, **variables: str) -> str:
    """Output of a python command in a process of its own, that sees this checkout."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = os.environ | {"HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=home, env=environment | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr + done.stdout


def losses(home: Path, *command: object, steps: range = range(20)) -> list[str]:
    """The losses that a program prints, by step."""
    with tempfile.TemporaryDirectory(prefix="rr-") as folder:  # its sockets want a short path
        printed = run(
            home, *command, RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=folder, RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN="0" * 64,
        )  # fmt: skip
        # On a busy machine Ray's driver ends before it has shown the last lines of its workers.
        for path in Path(folder).glob("ray/session_2*/logs/worker-*.out"):
            printed += path.read_text()
    shown = dict(re.findall(r"step +(\d+)  loss (\d+\.\d+)", printed))
    assert sorted(map(int, shown)) == list(steps)
    return [shown[str(step)] for step in steps]


# Odd as its own length, and of more than one block of keys; SDPA of 4097 takes a minute.
@pytest.mark.parametrize("seq_len", [1025, *exhaustive(4097, 3)])
def test_the_first_snippet_of_the_readme(tmp_path: Path, seq_len: int) -> None:
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert snippet is not None
    (tmp_path / "attend.py").write_text(snippet[1].replace("4097", str(seq_len)))
    printed = run(tmp_path, *TORCHRUN, 2, tmp_path / "attend.py")
    held = rf"held \(1, 8, {-(-seq_len // 4) * 2}, 64\)"
    # Two ranks may write at once, a line's end after both.
    differences = re.findall(rf"{held}; largest difference from SDPA: (\de[+-]\d\d)", printed)
    assert len(differences) == 2
    assert all(float(difference) < 2e-5 for difference in differences)


@pytest.mark.slow
def test_torchrun_training_has_the_same_curve_on_one_rank_and_two(tmp_path: Path) -> None:
    alone, two = (
        [float(x) for x in losses(tmp_path, *TORCHRUN, ranks, EXAMPLES / "torchrun_training.py")]
        for ranks in (1, 2)
    )
    assert alone[-1] < alone[0] / 10
    torch.testing.assert_close(alone, two, atol=2e-3, rtol=2e-3)


@pytest.mark.exhaustive
def test_ray_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # it makes its own
        monkeypatch.delenv(name, raising=False)
    printed = run(tmp_path, EXAMPLES / "ray_actors.py")
    errors = re.findall(r"^rank \d: (\S+) from SDPA", printed, re.MULTILINE)
    assert len(errors) == 2
    assert all(float(error) < 1e-5 for error in errors)


@pytest.mark.exhaustive
def test_the_examples_train_alike(tmp_path: Path) -> None:
    """Whoever forms the ring, the losses are the same to all digits printed."""
    by_torchrun = losses(tmp_path, *TORCHRUN, 2, EXAMPLES / "torchrun_llama.py")
    assert float(by_torchrun[-1]) < 0.5 * float(by_torchrun[0])
    if not torch.cuda.is_available():  # where both run two workers
        assert losses(tmp_path, EXAMPLES / "ray_train.py") == by_torchrun


@pytest.mark.exhaustive
def test_fine_tuning_has_one_loss_on_any_ring_and_goes_on(tmp_path: Path) -> None:
    program = [EXAMPLES / "finetune.py", "--data", ROOT / "docs", "--seq-len", 501]
    alone = losses(tmp_path, *TORCHRUN, 1, *program)
    checkpoints = ["--checkpoints", tmp_path / "kept"]
    ring = losses(tmp_path, *TORCHRUN, 2, *program, *checkpoints)
    assert [float(loss) for loss in ring] == pytest.approx(
        [float(loss) for loss in alone], abs=2e-4
    )
    assert float(ring[-1]) < 0.8 * float(ring[0])
    assert losses(tmp_path, *program, "--workers", 2) == ring
    longer = [*program, *checkpoints, "--steps", 22]
    longest = losses(tmp_path, *TORCHRUN, 4, *longer, steps=range(20, 22))
    assert max(map(float, longest)) < float(ring[10])


@pytest.mark.exhaustive
def test_the_notebook_runs(tmp_path: Path) -> None:
    book = json.loads((EXAMPLES / "results.ipynb").read_text("utf-8"))
    cells = ["".join(one["source"]) for one in book["cells"] if one["cell_type"] == "code"]
    assert len(cells) == 4
    (tmp_path / "cells.py").write_text(
        "\n".join([*cells, "print(len(frame), set(frame.status), summary.counts)"])
    )
    printed = run(tmp_path, tmp_path / "cells.py", RINGRAY_HOME=str(tmp_path))
    assert "[4/4] zigzag 256  ok" in printed
    assert re.search(r"^256 +\d+\.\d+ +\d+\.\d+$", printed, re.MULTILINE)
    assert printed.endswith("4 {'ok'} {'ok': 4}\n")


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


def executed(name: str, until: str = "no such heading", least: int = 1) -> dict[str, Any]:
    """Returns what the python blocks of a page define, which are run in order, but for those that a
    comment excuses."""
    text, _, _ = (ROOT / "docs" / name).read_text("utf-8").partition(until)
    blocks = re.findall(r"(?<!-->\n)^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= least
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return names


def page(name: str, least: int, rank: int, size: int) -> None:
    """All but blocks of Hugging Face, which need what only those of its own page have."""
    executed(name, "## Hugging Face", least)


# Pages, and the blocks that they have at least.
RUN = [
    ("models.md", 8),
    ("coming-from.md", 4),
    ("coming-from-training.md", 5),
    ("training.md", 1),
    ("ten-minutes.md", 1),
    ("packed.md", 1),
    ("rl.md", 1),
]


@pytest.mark.parametrize(("name", "least"), RUN)
def test_pages_run(name: str, least: int) -> None:
    on_ring(2, (partial(page, name, least),))


def test_the_snippets_of_training_tools_run() -> None:
    for tool in ("accelerate", "torchtitan"):
        pytest.importorskip(tool)
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        names = executed("accelerate.md", least=2)
    finally:  # what it keeps for the process
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
    assert names["loss"].isfinite()
    assert names["titan"].model_spec.model.layers[0].attention.inner_attention.window is None


def test_the_snippets_of_hugging_face_run(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        names = executed("huggingface.md")
    finally:
        dist.destroy_process_group()
    assert torch.equal(names["whole"], names["loss"].detach())
    assert names["batch"]["ring"].cu_seqlens == (0, 100, 250, 509)


def test_the_snippet_of_plug_ins_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed("plugins.md", "## TRL")
    assert [entry["step"] for entry in names["trainer"].state.log_history] == [1, 2, 3, 3, 3]
