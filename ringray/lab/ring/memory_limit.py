"""Memory limit of a CPU rank: its usage at the start of the first trial plus a number of bytes.

The kernel enforces it (``RLIMIT_DATA``: all private writable memory) on everything in the process:
an allocation beyond it fails as on a full device. Imports neither torch nor ray.
"""

from __future__ import annotations

import resource
from pathlib import Path


class MemoryLimit:
    """``limit``: bytes, None for no limit. Takes effect with :meth:`impose`."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._most: int | None = None

    def impose(self) -> None:
        """Makes allocations beyond the limit fail; the first call sets the baseline."""
        if self.limit is None:
            return
        if self._most is None:
            self._most = in_use() + self.limit
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = self._most if hard == resource.RLIM_INFINITY else min(self._most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))

    def lift(self) -> None:
        """Suspends the limit: a rank without memory must still be able to report that."""
        if self.limit is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def left(self) -> int | None:
        """Returns the bytes below the limit, None without one."""
        return None if self._most is None else max(0, self._most - in_use())


def in_use() -> int:
    """Returns the bytes of private writable memory of this process, as the kernel counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no line VmData")
