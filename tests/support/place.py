"""Real sweeps for tests: ``ringray`` as a process of its own, in a home of its own.

Every process of a run (driver, tracker, Ray's own, the ranks) inherits ``RINGRAY_HOME`` and a
working directory that no other run has; so a test finds them all, and touches nobody else's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import SweepRow, TrialRow
from tests.support import tracking_store

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 900.0  # seconds; only reached when something hangs, on a slow machine too

TINY = """\
version: 1
name: {name}
kind: latency
ring: {{size: {size}, device: cpu, threads: 1}}
problem: {{seq_len: {seq_len}, heads: 2, head_dim: 16, dtype: float32, direction: forward}}
measure: {{warmup: {warmup}, repeats: {repeats}, replicas: {replicas}, baseline: null}}
limits: {{trial_timeout: {timeout}, retries: {retries}}}
"""


def tiny(name: str, **changes: Any) -> str:
    """A spec whose trials take milliseconds."""
    given = {
        "size": 2, "seq_len": 64, "warmup": 1, "repeats": 1, "replicas": 1, "timeout": "60s",
        "retries": 2,
    }  # fmt: skip
    return TINY.format(name=name, **(given | changes))


def wait_until(what: str, condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Returns the value of ``condition`` once that is true; fails after ``patience`` seconds."""
    until = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < until, f"not after {patience:.0f} s: {what}"
        time.sleep(0.02)
    return found


def lives(pid: int) -> bool:
    """Tells whether a process has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """Returns the lines on standard error without those that name a long wait: a busy machine
        has more of them."""
        return [line for line in self.err.splitlines() if not line.startswith("ringray: waiting ")]


def _listen() -> None:
    """Ctrl-C is heard also where whoever runs the tests has been told to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Place:
    """A home with its store, MLflow database and Ray folder, and the commands that run there."""

    home: Path
    ray: Path
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, beyond its own
    unset: tuple[str, ...] = ()  # names of variables that it lacks
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The caller's, less what it says of Ray, MLflow and Triton: defaults are tested."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "MLFLOW_", "RINGRAY_", "PYTEST_", "TRITON_"))
        }
        every = kept | {
            "HOME": str(self.home),
            "RINGRAY_HOME": str(self.home),
            "RAY_TMPDIR": str(self.ray),
            # Ray starts ranks at nice 15, where those of a test would starve beside other tests.
            "RAY_worker_niceness": "0",
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}",
            "NO_COLOR": "1",
            **self.variables,
        }
        return {name: value for name, value in every.items() if name not in self.unset}

    def spec(self, text: str) -> Path:
        """A file with that spec."""
        path = self.home / f"{text.split('name: ')[1].split()[0]}.yaml"
        path.write_text(text)
        return path

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """``ringray ARGUMENTS`` in the background, by default in a process group of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "ringray", *map(str, arguments)],
            text=True, cwd=self.home, env=self.environment, preexec_fn=_listen,
            **(
                {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
                | options
            ),
        )  # fmt: skip
        self.started.append(process)
        return process

    def end(self, process: subprocess.Popen[str], patience: float = PATIENCE) -> Done:
        """Waits for a started command."""
        began = time.monotonic()
        out, err = process.communicate(timeout=patience)
        return Done(process.returncode, out, err, time.monotonic() - began)

    def run(self, *arguments: object, **options: Any) -> Done:
        """``ringray ARGUMENTS`` until it ends."""
        return self.end(self.start(*arguments, **options))

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """The complete records of a ``--json`` file."""
        if not path.exists():
            return []
        text = path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def sweeps(self) -> list[SweepRow]:
        """Returns the sweeps of the store; none where there is no store."""
        path = self.home / "store.db"
        if not path.exists() or path.stat().st_size == 0:  # a driver is about to make it
            return []
        with Store(path, create=False) as store:
            return store.sweeps()

    def trials(self, name: str) -> list[TrialRow]:
        """The store's trials of a sweep."""
        with Store(self.home / "store.db", create=False) as store:
            return store.trials(store.find(name).digest)

    def mlflow(self, experiment: str) -> tuple[list[Any], dict[str, Any]]:
        """MLflow's parent runs, and its child runs by trial key; fails on a double."""
        database = self.home / "mlflow.db"
        if not database.exists() or database.stat().st_size == 0:
            return [], {}
        return tracking_store.runs(f"sqlite:///{database}", experiment)

    def processes(self) -> list[psutil.Process]:
        """All live processes of runs in this place."""
        return [process for process in psutil.process_iter() if self._ours(process)]

    def ranks(self) -> list[psutil.Process]:
        """The live rank actors, by pid."""
        found = [process for process in self.processes() if "ray::Rank" in title(process)]
        return sorted(found, key=lambda process: process.pid)

    def check_nothing_is_left(self, but: tuple[str, ...] = ()) -> None:
        """Fails when a process outlives its run, except those titled ``but``."""
        until = time.monotonic() + PATIENCE
        while left := {p.pid: title(p) for p in self.processes() if not title(p).startswith(but)}:
            assert time.monotonic() < until, f"left after {PATIENCE:.0f} s: {left}"
            time.sleep(0.1)

    def _ours(self, process: psutil.Process) -> bool:
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            # A process that gives itself a title may write it over its environment.
            return process.cwd() == str(self.home) or process.environ().get("RINGRAY_HOME") == str(
                self.home
            )
        except psutil.Error:
            return False

    def clear(self) -> None:
        """Ends what a failed test left behind, by pid, and removes Ray's folder."""
        for command in self.started:
            if command.poll() is None:
                command.kill()
                command.communicate()
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.ray, ignore_errors=True)


def title(process: psutil.Process) -> str:
    """The command line, empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def place(folder: Path) -> Iterator[Place]:
    """A place in ``folder``; for fixtures."""
    # Ray's sockets lie in its folder, and the names of sockets must be short.
    made = Place(folder, Path(tempfile.mkdtemp(prefix="rr-")))
    try:
        yield made
    finally:
        made.clear()
