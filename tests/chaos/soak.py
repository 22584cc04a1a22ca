"""Soak test: thousands of trials in one sweep, whose processes must not grow.

    python -m tests.chaos.soak --trials 5000

Memory that belongs to one process alone (USS), open files, threads and sockets of driver, ranks and
tracker are looked at once a second. The last fifth of the trials must find them as the second fifth
did: what starts slowly (imports, pools, caches) has by then.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.support import place as drive
from tests.support.place import Place

if TYPE_CHECKING:
    import subprocess

LENGTHS = (64, 96, 128, 160, 192)
SPEC = """\
version: 1
name: soak
kind: latency
ring: {{size: 2, device: cpu, threads: 1}}
problem: {{seq_len: {lengths}, heads: 2, head_dim: 16, dtype: float32}}
strategy: {{partition: [contiguous, striped, zigzag, zigzag-token]}}
measure: {{warmup: 0, repeats: 1, replicas: {replicas}, baseline: null}}
"""
GROWTH = 0.02  # of memory that is taken for the same
GROWTH_MIB = 4.0  # whatever the size
MORE = 2  # files, threads or sockets that may be open by chance


@dataclass(frozen=True)
class Held:
    """Resources of one process. ``mib``: USS."""

    mib: float
    files: int
    threads: int
    sockets: int


@dataclass
class Watch:
    """Samples by process and by fifth of the sweep."""

    trials: int
    samples: dict[str, list[list[Held]]] = field(
        default_factory=lambda: collections.defaultdict(lambda: [[] for _ in range(5)])
    )

    def look(self, place: Place, driver: subprocess.Popen[str]) -> int:
        """Takes a sample of every process; the trials that have ended."""
        (sweep,) = place.sweeps() or (None,)
        ended = sum(sweep.counts.values()) if sweep else 0
        fifth = min(4, 5 * ended // self.trials)
        named = {"driver": psutil.Process(driver.pid)}
        named |= {f"rank {i}": rank for i, rank in enumerate(place.ranks())}
        for process in place.processes():
            if "ringray.lab.tracking.process" in drive.title(process):
                named["tracker"] = process
        if ended == self.trials:  # it is taking itself down
            return ended
        for name, process in named.items():
            with suppress(psutil.Error):
                self.samples[name][fifth].append(held(process))
        return ended

    def growths(self) -> list[str]:
        """A line for each thing that grew from the second fifth to the last."""
        found = []
        for name, fifths in self.samples.items():
            before, after = middle(fifths[1]), middle(fifths[4])
            if after.mib > before.mib * (1 + GROWTH) + GROWTH_MIB:
                found.append(f"{name}: memory {before.mib:.1f} -> {after.mib:.1f} MiB")
            for what in ("files", "threads", "sockets"):
                if getattr(after, what) > getattr(before, what) + MORE:
                    found.append(
                        f"{name}: {what} {getattr(before, what)} -> {getattr(after, what)}"
                    )
        return found

    def table(self) -> str:
        """Medians by process and fifth."""
        lines = ["process    fifth   MiB     files  threads  sockets"]
        for name, fifths in self.samples.items():
            for number, samples in enumerate(fifths, start=1):
                if samples:
                    one = middle(samples)
                    lines.append(
                        f"{name:10} {number:5}   {one.mib:6.1f}  {one.files:5}  {one.threads:7}  "
                        f"{one.sockets:7}"
                    )
        return "\n".join(lines)


def held(process: psutil.Process) -> Held:
    with process.oneshot():
        return Held(
            process.memory_full_info().uss / 2**20, process.num_fds(), process.num_threads(),
            len(process.net_connections()),
        )  # fmt: skip


def middle(samples: list[Held]) -> Held:
    """The median of each."""
    assert samples, "too few trials, or too fast, to be looked at"
    return Held(
        statistics.median(one.mib for one in samples),
        *(
            int(statistics.median(getattr(one, what) for one in samples))
            for what in ("files", "threads", "sockets")
        ),
    )


def run(place: Place, trials: int) -> Watch:
    """The sweep, to its end; AssertionError if it does not end well or leaves anything."""
    replicas = max(1, trials // (4 * len(LENGTHS)))
    watch = Watch(4 * len(LENGTHS) * replicas)
    log = place.home / "soak.log"  # a pipe that nobody reads would hold the driver
    with log.open("w") as said:
        driver = place.start(
            "run", place.spec(SPEC.format(lengths=list(LENGTHS), replicas=replicas)), "--json",
            place.home / "soak.jsonl", stdout=said, stderr=said,
        )  # fmt: skip
    moved, before = time.monotonic(), -1
    while driver.poll() is None:
        ended = watch.look(place, driver)
        if ended != before:
            moved, before = time.monotonic(), ended
        assert time.monotonic() - moved < drive.PATIENCE or ended == watch.trials, "it hangs"
        time.sleep(1.0)
    out = log.read_text()[-2000:]
    assert place.end(driver).code == 0, out
    assert len(place.lines(place.home / "soak.jsonl")) == watch.trials
    synced = place.run("sync", "soak")  # a tracker that is behind gives up after a while
    assert synced.code == 0, synced.out + synced.err
    _, children = place.mlflow("soak")
    assert len(children) == watch.trials, f"{len(children)} runs in MLflow: {out}"
    place.check_nothing_is_left()
    return watch


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--trials", type=int, default=5000)
    given = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ringray-soak-") as folder:
        for place in drive.place(Path(folder)):
            watch = run(place, given.trials)
    print(watch.table())
    growths = watch.growths()
    print(f"{watch.trials} trials in {time.monotonic() - began:.0f} s")
    print("\n".join(growths) or "nothing grows")
    return 1 if growths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
