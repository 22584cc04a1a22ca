"""Other sweeps beside the one that the campaign disturbs, judged when that has ended."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ringray.lab.store.store import Store
from tests.support import tracking_store
from tests.support.place import Place, tiny

# Endings after which a user would go on. A second Ctrl-C ends the driver as the signal itself does.
RESUMED = (1, 2, 3, 130, -signal.SIGKILL, -signal.SIGINT)
TURNS = 5  # how often somebody goes on before they give up
TURN_S = 150.0


@dataclass
class Beside:
    """Sweeps of the same ``spec``, at once, in one home. ``uri``: where they are tracked."""

    place: Place
    specs: list[Path]
    uri: str
    begun: list[subprocess.Popen[str]] = field(default_factory=list)

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
        said = []
        for _ in range(TURNS):
            done = self.place.end(driver, TURN_S)
            said.append(f"{done.code}: {done.err[-2000:]}")
            assert "Traceback" not in done.err, said
            if done.code == 0:
                return
            assert done.code in RESUMED, said
            driver = self.place.start("run", spec)
        raise AssertionError(said)

    def close(self) -> None:
        """Ends what is left of them, by pid."""
        for driver in self.begun:
            if driver.poll() is None:
                driver.kill()
                driver.communicate()
        for process in self.place.processes():
            process.kill()


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
