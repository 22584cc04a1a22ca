"""The memory limit of a CPU rank counts what trials take."""

from __future__ import annotations

import subprocess
import sys

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


def test_what_goes_beyond_the_limit_is_refused_until_it_is_lifted() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert done.stdout == "refused\n", done.stderr
