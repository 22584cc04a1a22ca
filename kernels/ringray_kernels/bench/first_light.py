"""The first light on a GPU: what it can tell in nine minutes, in stages of a process each.

A stage that hangs or crashes costs at most its own time: the file holds all that was found, and
after a hang the stage is started again without that contender. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ringray_kernels.bench.source import source_digest
from ringray_kernels.bench.watchdog import EXIT_HUNG, EXIT_USAGE, PATIENCE_S

_ATTEMPTS = 3
_LEAST_S = 8.0  # a process that has less time left would only start
_CPU_SLOWER = 4
_INTERRUPT_S = 3.0  # from asking a process to end until killing it
_REAP_S = 10.0  # a killed process may wait for its device
# Runs a command whose process group is killed when the other end of its input closes: even where
# this process, which holds it, is killed itself, nothing is left on the device.
_TIED = ("sh", "-c", 'exec 3<&0 </dev/null; (read -r _ <&3; kill -KILL 0) & exec "$@" 3<&-', "sh")
_BENCH = (sys.executable, "-m", "ringray_kernels.bench")
_FACTS = "experiments/yardsticks.py"
_COMPILE = "experiments/precompile.py"
_PROFILE = "experiments/profile.sh"
_MEMCHECK = (
    'compute-sanitizer --error-exitcode 99 "$PYTHON" -m ringray_kernels.bench --stage memcheck '
    '--resume "$FILE" --patience 100'
)
_TESTS = f'"$PYTHON" -m pytest -q -m gpu -n {min(8, os.cpu_count() or 1)} --maxfail=30 tests'


@dataclass(frozen=True)
class Stage:
    """One process, ended after ``seconds``.

    ``patience``: seconds without progress after which it ends itself; ``command``: a shell's, in
    place of a process of ours; ``needs``: tools and files without which it is skipped; ``once``:
    does not run again on the same machine and sources; ``interpreted``: on a CPU, Triton runs in
    its interpreter.
    """

    name: str
    seconds: float
    patience: float = 30.0
    command: str = ""
    needs: Sequence[str] = ()
    once: bool = False
    interpreted: bool = False


# The last one prints the summary and always runs; ``stages`` has the work of ours.
SUMMARY = Stage("summary", 15)
# Those of a row run side by side.
STAGES: Sequence[Sequence[Stage]] = (
    (
        Stage("facts", 50, command=f'"$PYTHON" {_FACTS} "$FILE"', needs=(_FACTS,)),
        Stage("precompile", 100, command=f'"$PYTHON" {_COMPILE}', needs=(_COMPILE, "nvidia-smi")),
    ),
    (Stage("portable", 50, 25, interpreted=True),),
    (Stage("candidates", 60, 25, interpreted=True),),
    (Stage("forward", 60),),
    (Stage("backward", 80),),
    (
        Stage("tests", 150, command=_TESTS, needs=("tests/kernels/test_gpu.py",), once=True),
        Stage("memcheck", 120, command=_MEMCHECK, needs=("compute-sanitizer",), once=True),
    ),
    (Stage("sparse", 60),),
    (Stage("profile", 60, command=f'sh {_PROFILE} "$FILE"', needs=(_PROFILE, "ncu"), once=True),),
    (Stage("sweep", 100),),
    (Stage("flex-attention", 240, 200),),
    (Stage("all", 600, PATIENCE_S),),
    (SUMMARY,),
)


def conduct(
    rows: Sequence[Sequence[Stage]], path: Path, minutes: float, options: Sequence[str], device: str
) -> int:
    """Runs stages, which append to ``path``, within ``minutes``; ``options`` go to all of ours.

    Returns 0; 1 if the summary has failures or no figure, or a stage failed; 2 at once if one says
    that the command line or the machine is wrong.
    """
    until, lines, failed = time.monotonic() + 60 * minutes, ["\nstages:"], False
    for number in (signal.SIGINT, signal.SIGTERM):  # even where a shell has it ignored
        signal.signal(number, signal.default_int_handler)
    read, write = os.pipe()
    # The pipe closes before the threads are waited for: this ends the stages under way.
    with ThreadPoolExecutor() as pool, os.fdopen(read) as tie, os.fdopen(write, "w") as hold:
        slower = _CPU_SLOWER if device == "cpu" else 1
        run = _Run(path, until, options, device, slower, tie, hold)
        for row in rows:
            for line, code in pool.map(run.stage, row, [len(row) > 1] * len(row)):
                if code == EXIT_USAGE:
                    return code
                lines.append(line)
                failed |= code != 0
    print("\n".join(lines), flush=True)
    return int(failed)


@dataclass(frozen=True)
class _Run:
    """One run; ``until`` is its end by the monotonic clock, ``slower`` what times are multiplied
    with, ``tie`` the input of its stages, ``hold`` its other end."""

    path: Path
    until: float
    options: Sequence[str]
    device: str
    slower: int
    tie: IO[str]
    hold: IO[str]

    def stage(self, stage: Stage, beside: bool) -> tuple[str, int]:
        """Runs one stage; returns a line about it and its exit code. ``beside`` others, its output
        goes to a file."""
        began = time.monotonic()
        fact = {"fact": "stage", "stage": stage.name, "machine": platform.node()}
        fact["source"] = source_digest(Path("ringray"), Path("tests"))
        output = Path(f"{self.path}.{stage.name}.txt")
        missing = [x for x in stage.needs if not (shutil.which(x) or Path(x).exists())]
        if missing:
            outcome, code = f"skipped, {missing[0]} is not here", 0
        elif stage.once and json.dumps({**fact, "outcome": "done"})[:-1] in self.path.read_text():
            outcome, code = "done before", 0
        else:
            with output.open("w") if beside else contextlib.nullcontext() as file:
                outcome, code = self._outcome(stage, began, file)
        if code == EXIT_USAGE:
            return outcome, code
        line = {**fact, "outcome": outcome, "s": round(time.monotonic() - began, 1)}
        with self.path.open("a", encoding="utf-8") as results:
            print(json.dumps(line), file=results)
        last = output.read_text("utf-8").splitlines()[-1:] if output.exists() else []
        text = "; ".join([f"stage {stage.name}: {outcome}, {line['s']} s", *last])
        print(text, flush=True)
        return text, code

    def _outcome(self, stage: Stage, began: float, output: IO[str] | None) -> tuple[str, int]:
        """Runs one stage, again after a hang; returns its outcome and exit code."""
        # Time for the summary stays free: without it nobody reads what was measured.
        reserved = 0 if stage is SUMMARY else self.slower * SUMMARY.seconds
        end = min(self.until - reserved, began + self.slower * stage.seconds)
        for _ in range(_ATTEMPTS):
            seconds = end - time.monotonic()
            if seconds < _LEAST_S:
                return "no time left", int(stage is SUMMARY)
            ours = [*_BENCH, "--stage", stage.name, "--resume", str(self.path)]
            ours += ["--device", self.device, "--minutes", str(0.9 * seconds / 60)]
            ours += ["--patience", str(self.slower * stage.patience), *self.options]
            code = self._process(stage, ours, seconds, output)
            if code is None:  # what tests and the summary would have said is not known
                return "ended at its limit", int(stage is SUMMARY or bool(stage.command))
            if code == 0 or (code == EXIT_USAGE and not stage.command):
                return "done", code
            if code != EXIT_HUNG or stage.command:
                if self.hold.closed:  # this run was interrupted, and so its stages end
                    return "interrupted", 1
                how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                return f"failed with {how}", 1
        return f"hung {_ATTEMPTS} times", 1

    def _process(
        self, stage: Stage, ours: Sequence[str], seconds: float, output: IO[str] | None
    ) -> int | None:
        """Returns the exit code of a stage's command or of ``ours``, or None if it took longer than
        ``seconds``; leaves nothing of its process group."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment |= {"PYTHON": sys.executable, "FILE": str(self.path)}
        if self.device == "cpu":
            environment["TRITON_INTERPRET"] = str(int(stage.interpreted))
        command = [*_TIED, *(("sh", "-c", stage.command) if stage.command else ours)]
        pipes: dict[str, Any] = {"stdin": self.tie, "stdout": output, "stderr": output}
        child = subprocess.Popen(command, process_group=0, env=environment, **pipes)
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_INTERRUPT_S)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_REAP_S)
