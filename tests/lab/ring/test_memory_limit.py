"""The memory limit of a CPU rank counts what trials take."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMITED = """
from ringray.lab.ring.memory_limit import MemoryLimit

limit = MemoryLimit(64 << 20)
limit.impose()
kept = bytearray(40 << 20)
try:
    bytearray(40 << 20)
except MemoryError:
    assert limit.left() < 24 << 20
    limit.lift()
    bytearray(40 << 20)
    print("refused")
"""

TRIAL = """
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


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout or done.stderr


def test_what_goes_beyond_the_limit_is_refused_until_it_is_lifted() -> None:
    assert run(LIMITED) == "refused\n"


@pytest.mark.exhaustive
def test_a_trial_has_the_whole_limit() -> None:
    """Libraries that a rank loads when it first measures take more than this one."""
    assert run(TRIAL).startswith("RankReport(")
