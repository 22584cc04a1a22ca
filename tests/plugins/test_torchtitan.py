"""torchtitan's context parallelism on the ring, against the installed release."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "titan_program.py"


def losses(*cases: str, ranks: int) -> dict[str, list[float]]:
    """Losses of a Trainer in processes of their own: it changes what is global in its process."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), *cases], capture_output=True, text=True,
        check=False, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    printed: dict[str, list[float]] = json.loads(re.findall("losses: (.*)", done.stdout)[0])
    return printed


def test_losses_are_those_of_its_own_attention_in_one_process() -> None:
    alone = losses("plain:50", "spmd_types:5", ranks=1)
    want = alone["plain:50"]
    assert len(want) == 50
    assert want[-1] < 0.5 * want[0]
    assert alone["spmd_types:5"] == pytest.approx(want[:5], abs=1e-4)
    ring = losses("partial_dtensor:50", "full_dtensor:5", ranks=2)
    assert ring["partial_dtensor:50"] == pytest.approx(want, abs=1e-4)
    # With this backend torchtitan logs the sum of what every rank already has.
    both = [2 * loss for loss in want[:5]]
    assert ring["full_dtensor:5"] == pytest.approx(both, abs=2e-4)
