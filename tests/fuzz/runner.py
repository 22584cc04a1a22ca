"""Runs fuzzed specs through ``load`` and ``build``, each under limits of CPU time and memory.

python -m tests.fuzz.runner SEED INDEX      # one case again: its bytes and what came of it
python -m tests.fuzz.runner SEED 0-9999     # many, shared among the cores
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringray.base.errors import SpecError
from ringray.lab.plan.plan import build
from ringray.lab.predict import hardware
from ringray.lab.specs.model import load
from tests.fuzz import check
from tests.fuzz.generate import make

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU_S = 120.0  # of one case; 100,000 points, the most that a plan has, take about 20
MEMORY = 8 << 30  # of address space, of which libraries reserve most
CHUNK = 250


class Hang(BaseException):
    """A case took more CPU time than it may; no handler of errors catches it."""


@dataclass
class Found:
    """Results of some cases. ``wrong``: index and what is wrong; ``slowest``: seconds of CPU time
    and index."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[int, str]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)

    def add(self, other: Found) -> None:
        self.counts += other.counts
        self.wrong += other.wrong
        self.slowest = max(self.slowest, other.slowest)


def one(seed: int, index: int, path: Path) -> str:
    """``accepted``, ``refused spec`` or ``refused plan``; anything that is wrong is raised."""
    path.write_bytes(make(seed, index)[1])
    fleet = hardware.gpus() if index % 3 == 0 else hardware.cpu(2)
    stage = "spec"
    try:
        spec = load(path)
        stage = "plan"
        plan = build(spec, fleet)
    except SpecError as error:
        check.refused(str(error), str(path))
        return f"refused {stage}"
    check.accepted(spec, plan)
    return "accepted"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Hang(f"more than {CPU_S:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def some(seed: int, indices: range) -> Found:
    """Several cases, in this process."""
    found = Found()
    with tempfile.TemporaryDirectory(prefix="ringray-fuzz-") as folder:
        path = Path(folder) / "f.yaml"
        for index in indices:
            began = time.process_time()
            try:
                with _limited():
                    found.counts[one(seed, index, path)] += 1
            except (Exception, Hang):
                found.wrong.append((index, traceback.format_exc()))
            found.slowest = max(found.slowest, (time.process_time() - began, index))
    return found


def _bounded(seed: int, indices: range) -> Found:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    return some(seed, indices)


def many(seed: int, indices: range, processes: int) -> Found:
    """All cases, shared among processes of bounded memory."""
    found = Found()
    chunks = [indices[at : at + CHUNK] for at in range(0, len(indices), CHUNK)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for part in pool.map(_bounded, [seed] * len(chunks), chunks):
            found.add(part)
    return found


def report(seed: int, found: Found) -> str:
    """The counts, and of what is wrong the first few with how to see them again."""
    counts = found.counts + Counter({"wrong": len(found.wrong)})
    said = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    lines = [f"seed {seed}: {counts.total():,} specs: {said}"]
    lines.append(f"slowest: {found.slowest[0]:.1f} s of CPU time, index {found.slowest[1]}")
    for index, said in found.wrong[:10]:
        lines += ["", f"python -m tests.fuzz.runner {seed} {index}", said.rstrip()[-3000:]]
    if len(found.wrong) > 10:
        lines.append(f"and {len(found.wrong) - 10} more: {[i for i, _ in found.wrong[10:60]]}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """1 if anything is wrong."""
    seed, first, last = int(arguments[0]), *arguments[1].partition("-")[::2]
    if not last:
        how, data = make(seed, int(first))
        print(f"{how}: {data!r}")
        found = some(seed, range(int(first), int(first) + 1))
    else:
        found = many(seed, range(int(first), int(last) + 1), os.cpu_count() or 1)
    print(report(seed, found))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
