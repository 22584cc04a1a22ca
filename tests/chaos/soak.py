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
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support import place as drive
from tests.support.place import Place

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
# What a process holds -> its growth that is taken for none: a share, and so much whatever the size.
ALLOWED = {"MiB": (0.02, 4.0), "files": (0.0, 2), "threads": (0.0, 2), "sockets": (0.0, 2)}


class Watch:
    """Samples of what processes hold, by fifth of the sweep and by process."""

    def __init__(self, trials: int) -> None:
        self.trials = trials
        self._samples: list[dict[str, list[list[float]]]] = [
            collections.defaultdict(list) for _ in range(5)
        ]

    def look(self, place: Place, driver: subprocess.Popen[str]) -> None:
        """Takes a sample of every process."""
        ended = sum(sum(sweep.counts.values()) for sweep in place.sweeps())
        if ended == self.trials:  # it is taking itself down
            return
        named = {"driver": psutil.Process(driver.pid)}
        named |= {f"rank {number}": rank for number, rank in enumerate(place.ranks())}
        for process in place.processes():
            if "ringray.lab.tracking.process" in drive.title(process):
                named["tracker"] = process
        for name, process in named.items():
            with suppress(psutil.Error), process.oneshot():
                self._samples[5 * ended // self.trials][name].append(
                    [
                        process.memory_full_info().uss / 2**20, process.num_fds(),
                        process.num_threads(), len(process.net_connections()),
                    ]
                )  # fmt: skip

    def medians(self, fifth: int) -> dict[tuple[str, str], float]:
        """Returns the median by process and by what it holds."""
        return {
            (name, what): statistics.median(values)
            for name, samples in self._samples[fifth].items()
            for what, values in zip(ALLOWED, zip(*samples, strict=True), strict=True)
        }

    def growths(self) -> list[str]:
        """Returns a line for each thing that grew from the second fifth to the last."""
        before, after = self.medians(1), self.medians(4)
        assert before.keys() == after.keys(), "too few trials, or too fast, to be looked at"
        return [
            f"{name}: {before[name, what]:.1f} -> {now:.1f} {what}"
            for (name, what), now in after.items()
            if now > before[name, what] * (1 + ALLOWED[what][0]) + ALLOWED[what][1]
        ]


def run(place: Place, trials: int) -> Watch:
    """The sweep, to its end; AssertionError if it does not end well or leaves anything."""
    replicas = max(1, trials // (4 * len(LENGTHS)))
    watch = Watch(4 * len(LENGTHS) * replicas)
    log = place.home / "soak.log"  # a pipe that nobody reads would hold the driver
    with log.open("w") as out:
        driver = place.start(
            "run", place.spec(SPEC.format(lengths=list(LENGTHS), replicas=replicas)), "--json",
            place.home / "soak.jsonl", stdout=out, stderr=out,
        )  # fmt: skip
    while driver.poll() is None:
        watch.look(place, driver)
        time.sleep(1.0)
    assert place.end(driver).code == 0, log.read_text()[-2000:]
    assert len(place.lines(place.home / "soak.jsonl")) == watch.trials
    synced = place.run("sync", "soak")  # a tracker that is behind gives up after a while
    assert synced.code == 0, synced.out + synced.err
    _, children = place.mlflow("soak")
    assert len(children) == watch.trials, f"{len(children)} runs in MLflow"
    place.check_nothing_is_left()
    return watch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--trials", type=int, default=5000)
    trials = parser.parse_args().trials
    with tempfile.TemporaryDirectory(prefix="ringray-soak-") as folder:
        for place in drive.place(Path(folder)):
            watch = run(place, trials)
    print("\n".join(watch.growths()) or "nothing grows")
    return 1 if watch.growths() else 0


if __name__ == "__main__":
    sys.exit(main())
