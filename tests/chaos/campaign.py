"""Faults at random moments in real sweeps on a real cluster, and what must be true after them.

    python -m tests.chaos.campaign --faults 200 --seed 7        # the whole campaign
    python -m tests.chaos.campaign --seed 7 --only 12           # its twelfth sweep again

A sweep of a few seconds is disturbed by several faults, drawn from the seed and its number: which,
and how long after the one before. Lost nodes come back after a while; a driver that ended is
started again with `ringray resume`, as its user would. Then every trial must have been measured and
recorded once, in the store, in the `--json` file and in MLflow; nobody may have waited for longer
than it takes a ring to start for the next sign of progress; nothing may be left of any driver or
ring. Of every second sweep the rings, of one rank and of two, are measured beside each other. What
other users and readers of the store have begun meanwhile is judged at the end of the sweep.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringray.base.errors import PlaceError, UserError
from ringray.lab.store.store import Store
from ringray.lab.tracking import tracker
from ringray.lab.trial.outcome import TrialRow
from tests.chaos.beside import RESUMED
from tests.chaos.campaign_faults import FAULTS
from tests.chaos.world import World, world
from tests.support import tracking_store
from tests.support.place import tiny

PER_SWEEP = 5
REPLICAS = 60
HANG_S = tracker.READY_S + 20.0  # without progress: the longest wait that is promised, and an end
VICTIM_S = 20.0  # how long a fault waits for something that it can be done to, such as ranks
STALL_S = 20.0  # what a trial may take


class Broken(AssertionError):
    """A promise does not hold."""


@dataclass
class Fault:
    """``after``: seconds since the one before; ``done``: whether there was anything to do it to."""

    name: str
    after: float
    done: bool = False


@dataclass
class Sweep:
    """One disturbed sweep, the ``number``-th of the campaign that ``seed`` names."""

    seed: int
    number: int
    faults: list[Fault] = field(default_factory=list)
    starts: int = 0
    endings: list[str] = field(default_factory=list)  # what each driver left behind

    def __post_init__(self) -> None:
        # One ring after the other on all nodes, or rings beside each other.
        self.sizes = (1, 2) if self.number % 2 else (3,)
        self.trials = set(itertools.product(self.sizes, range(REPLICAS // len(self.sizes))))
        draw = self._draw("faults")
        self.faults = [
            Fault(draw.choice(list(FAULTS)), draw.uniform(0.0, 5.0)) for _ in range(PER_SWEEP)
        ]

    @property
    def name(self) -> str:
        return f"chaos-{self.number}"

    def _draw(self, what: str) -> random.Random:
        return random.Random(f"{self.seed}-{self.number}-{what}")

    def run(self, of: World) -> None:
        """Until all its trials are measured; Broken if something is not as it must be."""
        of.mend()
        of.spoilt.clear()
        json_path = of.place.home / f"{self.name}.jsonl"
        text = tiny(
            self.name, size=list(self.sizes), replicas=REPLICAS // len(self.sizes), repeats=20,
            timeout=f"{STALL_S:g}s", retries=5,
        )  # fmt: skip
        placed = f"threads: 1, placement: {'strict-' * (len(self.sizes) > 1)}spread"
        spec = of.place.spec(text.replace("threads: 1", f"{placed}, concurrent: null"))
        driver = self._start(of, "run", spec, "--json", json_path)
        recorded: dict[str, float] = {}
        draw, waiting = self._draw("victims"), list(self.faults)
        due = moved = tended = time.monotonic()
        due += waiting[0].after
        while True:
            now = time.monotonic()
            if self._look(of, recorded):
                moved = now
            code = driver.poll()
            if code is not None:
                out, error = driver.communicate()
                said = (out + error).strip().splitlines()[-3:]
                self.endings.append(f"{code}: {' | '.join(said)}")
                # Python itself says so where it was interrupted before it had found the command.
                if "Traceback" in error and "_get_module_details" not in error:
                    raise Broken(f"{self.name}: a traceback of the driver:\n{error[-3000:]}")
                if code not in (0, *RESUMED):
                    raise Broken(f"{self.name}: the driver ended with {code}:\n{error[-3000:]}")
                of.mend()
                how = ["resume", self.name]
                if self._rows(of) is None:  # and the disk is free
                    self._recover(of)
                    how.append("--from-mlflow")
                elif code == 0:
                    break
                elif not self._rows(of):  # it had not come to begin it
                    how = ["run", str(spec)]
                driver = self._start(of, *how, "--json", json_path)
                moved = time.monotonic()
            if waiting and now >= due:
                if FAULTS[waiting[0].name](of, draw):
                    waiting[0].done = True
                    moved = max(moved, time.monotonic())
                if waiting[0].done or now >= due + VICTIM_S:
                    waiting.pop(0)
                    due = time.monotonic() + (waiting[0].after if waiting else 0.0)
            if now - tended > 1.0:
                of.tend()
                tended = now
            if now - moved > HANG_S:
                driver.kill()
                self.endings.append("hung: " + "".join(driver.communicate())[-2000:])
                raise Broken(f"{self.name}: no progress for {HANG_S:g} s")
            time.sleep(0.02)
        of.mend()
        self._check(of, recorded, json_path)
        of.check_beside()
        of.head.check_nothing_is_held()

    def _start(self, of: World, *arguments: object) -> subprocess.Popen[str]:
        self.starts += 1
        return of.place.start(*arguments)

    def _recover(self, of: World) -> None:
        """As a user would, who may have to wait for the processes of a driver that was killed."""
        until = time.monotonic() + HANG_S
        while (done := of.place.run("recover")).code != 0:
            if time.monotonic() > until:
                raise Broken(f"{self.name}: not recovered in {HANG_S:g} s: {done.err[-3000:]}")
            time.sleep(0.5)
        for copy in of.place.home.glob("store.db.damaged*"):  # the disk is small
            copy.unlink()

    def _rows(self, of: World) -> list[TrialRow] | None:
        """Returns the recorded trials, none of a sweep that was not begun. None: it cannot be read
        now: it is damaged, or the disk has no space for the files of sqlite beside it."""
        try:
            return of.place.trials(self.name) if of.place.sweeps() else []
        except PlaceError:
            if not of.disk_full and not of.spoilt:
                raise
            return None
        except UserError:  # not begun, or taken back: interrupted before the first trial
            return []

    def _look(self, of: World, recorded: dict[str, float]) -> bool:
        """Tells whether trials were measured since the last look, none for the second time; but
        those whose records were damaged may have to be."""
        rows = self._rows(of)
        if rows is None:
            return False
        ended = {r.key: r.ended for r in rows if r.status == "ok" and r.ended}
        for key, when in recorded.items():
            if ended.get(key) != when and key not in of.spoilt:
                raise Broken(f"{self.name}: trial {key} of {when} is now of {ended.get(key)}")
        more = len(ended) > len(recorded)
        recorded.update(ended)
        return more

    def _check(self, of: World, recorded: dict[str, float], json_path: Path) -> None:
        rows = self._rows(of) or []
        self._look(of, recorded)
        statuses = collections.Counter(row.status for row in rows)
        if statuses != {"ok": REPLICAS}:
            raise Broken(f"{self.name}: trials ended as {dict(statuses)}")
        oks = collections.Counter(
            _trial(line["config"])
            for line in of.place.lines(json_path) if line["status"] == "ok"
        )  # fmt: skip
        again = {_trial(row.config) for row in rows if row.key in of.spoilt}
        for trial in again & oks.keys():
            oks[trial] = 1
        if oks != collections.Counter(self.trials):
            unlike = {one: oks[one] for one in self.trials | oks.keys() if oks[one] != 1}
            raise Broken(f"{self.name}: --json has lost or doubled {unlike}")
        synced = of.place.run("sync", self.name)
        if synced.code != 0:
            raise Broken(f"{self.name}: sync ended with {synced.code}: {synced.err}")
        with Store(of.place.home / "store.db", create=False) as store:
            identity = store.identity
        parents, children = tracking_store.runs(of.server.uri, self.name, identity)
        if len(parents) != 1 or set(children) != {row.key for row in rows}:
            raise Broken(f"{self.name}: MLflow has {len(parents)} parents, {len(children)} runs")


def _trial(config: Mapping[str, Any]) -> tuple[int, int]:
    return config["ring_size"], config["replica"]


def run(of: World, seed: int, numbers: Iterator[int], faults: int) -> collections.Counter[str]:
    """Runs sweeps until ``faults`` have been done; returns how many of each kind."""
    counts = collections.Counter[str]()
    for number in numbers:
        sweep = Sweep(seed, number)
        began = time.monotonic()
        try:
            sweep.run(of)
        except Exception as error:
            told = "\n".join(map(str, [error, *sweep.faults, *sweep.endings]))
            raise Broken(
                f"{told}\nreplay: python -m tests.chaos.campaign --seed {seed} --only {number}"
            ) from error
        names = [fault.name for fault in sweep.faults if fault.done]
        counts.update(names)
        print(
            f"sweep {number}: {', '.join(names)}; {sweep.starts} drivers, "
            f"{time.monotonic() - began:.0f} s, {counts.total()} faults in all", flush=True,
        )  # fmt: skip
        if counts.total() >= faults:
            break
    return counts


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.campaign", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="drawn if not given, and printed")
    parser.add_argument("--only", type=int, help="the number of one sweep of that seed")
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    numbers = iter([options.only] if options.only is not None else range(10**6))
    with tempfile.TemporaryDirectory(prefix="ringray-chaos-") as folder, world(Path(folder)) as of:
        counts = run(of, seed, numbers, options.faults)
    for name, count in counts.most_common():
        print(f"{name:18} {count:3}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
