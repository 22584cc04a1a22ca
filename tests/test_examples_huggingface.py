"""The programs and snippets of the documentation run, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"


def losses(command: list[str], home: Path, steps: range = range(20)) -> list[str]:
    """The losses that a program prints, by step."""
    with tempfile.TemporaryDirectory(prefix="rr-") as folder:  # its sockets want a short path
        environment = os.environ | {
            "HOME": str(home), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_TMPDIR": folder,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        }  # fmt: skip
        done = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        # On a busy machine Ray's driver ends before it has shown the last lines of its workers.
        workers = [
            path.read_text() for path in Path(folder).glob("ray/session_2*/logs/worker-*.out")
        ]
    said = "".join([done.stdout, done.stderr, *workers])
    found = dict(re.findall(r"step +(\d+)  loss (\d+\.\d+)", said))
    assert sorted(map(int, found)) == list(steps)
    return [found[str(step)] for step in steps]


@pytest.mark.exhaustive
def test_the_examples_train_alike(tmp_path: Path) -> None:
    """Whoever forms the ring, the losses are the same to all digits printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    by_torchrun = losses(
        [*torchrun, "--nproc-per-node", "2", str(EXAMPLES / "torchrun_llama.py")], tmp_path
    )
    assert float(by_torchrun[-1]) < 0.5 * float(by_torchrun[0])
    if not torch.cuda.is_available():  # where both run two workers
        assert losses([sys.executable, str(EXAMPLES / "ray_train.py")], tmp_path) == by_torchrun


@pytest.mark.exhaustive
def test_fine_tuning_has_one_loss_on_any_ring_and_goes_on(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    program = [str(EXAMPLES / "finetune.py"), "--data", str(ROOT / "docs"), "--seq-len", "501"]
    alone = losses([*torchrun, "1", *program], tmp_path)
    kept = ["--checkpoints", str(tmp_path / "kept")]
    ring = losses([*torchrun, "2", *program, *kept], tmp_path)
    assert [float(loss) for loss in ring] == pytest.approx(
        [float(loss) for loss in alone], abs=2e-4
    )
    assert float(ring[-1]) < 0.8 * float(ring[0])
    assert losses([sys.executable, *program, "--workers", "2"], tmp_path) == ring
    longer = [*program, *kept, "--steps", "22"]
    more = losses([*torchrun, "4", *longer], tmp_path, range(20, 22))
    assert max(map(float, more)) < float(ring[10])


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_the_snippets_run() -> None:
    text = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(snippet, names)
    assert torch.equal(names["whole"], names["loss"].detach())
    assert names["batch"]["ring"].cu_seqlens == (0, 100, 250, 509)
