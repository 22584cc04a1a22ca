"""Other sweeps beside the one that the campaign disturbs, judged when that has ended."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ringray.lab.store.store import Store
from tests.support import place as drive
from tests.support import tracking_store
from tests.support.place import Place, tiny

# Endings after which a user would go on. A second Ctrl-C ends the driver as the signal itself does.
RESUMED = (1, 2, 3, 130, -signal.SIGKILL, -signal.SIGINT)
TURNS = 5  # how often somebody goes on before they give up
TURN_S = 150.0
STEPS = 80
TRAINING = f"""\
version: 1
name: trained
kind: train
ring: {{size: 2, device: cpu, threads: 1}}
problem: {{seq_len: 64, batch: 2, dtype: float32}}
training: {{model: llama-tiny, mlp_rows: 64, steps: {STEPS}, save_every: 5, checkpoints: kept}}
limits: {{retries: 5, trial_timeout: 20m}}
"""


@dataclass
class Beside:
    """Sweeps of the same ``spec``, at once, in one home. ``uri``: where they are tracked."""

    place: Place
    specs: list[Path]
    uri: str
    begun: list[subprocess.Popen[str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # by the drivers, in the order of their ends

    def begin(self) -> None:
        self.begun = [self.place.start("run", spec) for spec in self.specs]

    def check(self) -> None:
        """Goes on with what was interrupted; then every trial was measured and recorded once, in
        the store and in MLflow."""
        for spec, driver in zip(self.specs, self.begun, strict=True):
            self._finish(spec, driver)
        for sweep in self.place.sweeps():
            done = self.place.run("sync", sweep.name)
            assert done.code == 0, done.err
            rows = self.place.trials(sweep.name)
            assert {row.status for row in rows} == {"ok"}
            with Store(self.place.home / "store.db", create=False) as store:
                identity = store.identity
            parents, children = tracking_store.runs(self.uri, sweep.name, identity)
            assert len(parents) == 1
            assert set(children) == {row.key for row in rows}
        assert len(self.place.sweeps()) == len(self.specs)

    def _finish(self, spec: Path, driver: subprocess.Popen[str]) -> None:
        for _ in range(TURNS):
            done = self.place.end(driver, TURN_S)
            self.said.append(f"{done.code}: {done.out[-2000:]}{done.err[-2000:]}")
            assert "Traceback" not in done.err, self.said
            if done.code == 0:
                return
            assert done.code in RESUMED, self.said
            driver = self.place.start("run", spec)
        raise AssertionError(self.said)

    def close(self) -> None:
        """Ends what is left of them, by pid."""
        for driver in self.begun:
            if driver.poll() is None:
                driver.kill()
                driver.communicate()
        for process in self.place.processes():
            process.kill()


@dataclass
class Training(Beside):
    """A training whose ranks are killed once it has two checkpoints, the newer of which is damaged
    before others begin. ``draw``: decides how."""

    draw: random.Random = field(default_factory=random.Random)
    losses: list[float] = field(default_factory=list)  # up to the damaged checkpoint
    before: int = 0  # the step of the checkpoint that is left
    over: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        super().begin()
        self.striker = threading.Thread(target=self._strike, daemon=True)
        self.striker.start()

    def _strike(self) -> None:
        def whole() -> list[Path]:
            found = (self.place.home / "kept").glob("step-*/manifest.json")
            return sorted(path.parent for path in found if path.parent.suffix != ".part")

        drive.wait_until("two checkpoints", lambda: self.over.is_set() or len(whole()) > 1)
        if self.over.is_set():
            return
        ranks = self.place.ranks()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        psutil.wait_procs(ranks, TURN_S)  # none of them completes another one
        left, newest = whole()[-2:]
        self.losses = json.loads((newest / "facts.json").read_text())["losses"]
        damage(self.draw.choice(sorted(newest.iterdir())), self.draw)
        self.before = int(left.name.removeprefix("step-"))

    def check(self) -> None:
        """Then it went on from the checkpoint before, with every step once and as it was."""
        super().check()
        self.striker.join()
        (row,) = self.place.trials("trained")
        assert self.before > 0, self.said
        assert len(row.samples["loss"]) == STEPS
        assert row.samples["loss"][: len(self.losses)] == pytest.approx(self.losses, rel=1e-4)
        # Of the steps the first is not timed; none is, if only the end was left.
        went_on = STEPS - len(row.samples.get("ms", [])) - 1
        assert went_on >= self.before, self.said
        if row.attempts == 2 and len(self.said) == 1:  # nothing else has struck it
            assert went_on == self.before, self.said
            assert f"the training goes on from step {went_on}" in self.said[0]

    def close(self) -> None:
        self.over.set()
        super().close()


def damage(path: Path, draw: random.Random) -> None:
    """Leaves a part of a file, or changes a bit of it."""
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    if draw.random() < 0.5:
        os.truncate(path, at)
        return
    content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def second_user(first: Place, home: Path, spec: Path, uri: str) -> Beside:
    """Another user, who measures the same sweep on the cluster of ``first`` and tracks it to the
    same server ``uri``."""
    home.mkdir()
    copy = home / spec.name
    copy.write_bytes(spec.read_bytes())
    return Beside(Place(home, first.ray, dict(first.variables)), [copy], uri)


def first_runs(home: Path, ray: Path, draw: random.Random) -> Beside:
    """Two sweeps at once, the first ones ever of their user; one may be killed while it begins."""
    home.mkdir()
    ray.mkdir()
    place = Place(home, ray)
    specs = [place.spec(tiny(name, replicas=5)) for name in ("one", "two")]
    made = Beside(place, specs, f"sqlite:///{home}/mlflow.db")
    made.begin()
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0.0, 4.0))
        with suppress(ProcessLookupError):
            made.begun[0].kill()
    return made


def training(home: Path, ray: Path, draw: random.Random) -> Training:
    """A training on a Ray of its own, which will be struck."""
    home.mkdir()
    ray.mkdir()
    place = Place(home, ray)
    made = Training(place, [place.spec(TRAINING)], f"sqlite:///{home}/mlflow.db", draw=draw)
    made.begin()
    return made
