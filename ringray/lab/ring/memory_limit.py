"""What a rank may use of a CPU's memory: what it has when its first trial begins, and so much more.

The kernel holds it (``RLIMIT_DATA``: all private memory that can be written), so that it is true of
everything in the process: an allocation beyond it fails as it does on a device that is full.
Imports neither torch nor ray.
"""

from __future__ import annotations

import resource
from pathlib import Path


class MemoryLimit:
    """``limit``: bytes, None for no limit. Nothing is limited before :meth:`impose`."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._most: int | None = None

    def impose(self) -> None:
        """From here on, what would go beyond fails; measured from the first call."""
        if self.limit is None:
            return
        if self._most is None:
            self._most = in_use() + self.limit
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = self._most if hard == resource.RLIM_INFINITY else min(self._most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))

    def lift(self) -> None:
        """Until it is imposed again: a rank that has run out must still be able to say so."""
        if self.limit is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def left(self) -> int | None:
        """Bytes until the limit, None without one."""
        return None if self._most is None else max(0, self._most - in_use())


def in_use() -> int:
    """Bytes of private writable memory of this process, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status tells no VmData")
