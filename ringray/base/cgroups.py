"""The limits that control groups (v1 and v2) set to this process: cores and bytes of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT, SELF = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> float:
    """Returns how many cores the quotas allow, infinity without one."""
    quotas = [math.inf]
    for quota, period in _limits("cpu", 2, "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        quotas.append(quota / period if quota > 0 and period > 0 else math.inf)
    return min(quotas)


def memory() -> float:
    """Returns the bytes that this process and its relatives may use, infinity without a limit."""
    limits = _limits("memory", 1, "memory.max", "memory.limit_in_bytes")
    return min([math.inf, *(limit for (limit,) in limits)])


def _limits(controller: str, count: int, v2: str, *v1: str) -> Iterator[list[float]]:
    """Yields the ``count`` numbers in the files of each group that this process is in, and of those
    around it, whose limits hold, too."""
    lines = []
    with suppress(OSError):  # not Linux
        lines = SELF.read_text("utf-8", errors="replace").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and controller not in controllers.split(","):
            continue
        names = v1 if controllers else (v2,)
        for root in (ROOT / controllers, ROOT / (controller if controllers else "unified")):
            # A container may see its own group as the root, under a path that is the host's.
            inner = root / path.lstrip("/")
            for group in (x for x in (inner, *inner.parents) if x.is_relative_to(root)):
                with suppress(OSError, ValueError):
                    words = [word for name in names for word in (group / name).read_text().split()]
                    numbers = [math.inf if word == "max" else float(word) for word in words]
                    if len(numbers) == count:
                        yield numbers
