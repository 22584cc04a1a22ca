"""The memory limit of a CPU rank counts what trials take."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from ringray.lab.plan.plan import build
from ringray.lab.ring.actor import Rank
from ringray.lab.specs.model import parse

(trial,) = build(parse('''
version: 1
name: small
kind: latency
ring: {size: 1, device: cpu}
problem: {seq_len: 64, heads: 1, head_dim: 16, dtype: float32}
measure: {warmup: 1, repeats: 1}
''')).runnable
print(Rank("cpu", memory=64 << 20).run(trial.kind, trial.config.as_dict()))
"""


def test_a_trial_has_the_whole_limit() -> None:
    """Libraries that a rank loads when it first measures take more than this one."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("RankReport("), done.stdout + done.stderr
