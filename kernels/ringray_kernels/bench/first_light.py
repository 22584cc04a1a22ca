"""The first light on a GPU: what it can tell in nine minutes, in stages of a process each.

A stage that hangs or crashes costs at most its own time: the file holds all that was found, and
after a hang the stage is started again without that contender. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringray_kernels.bench.watchdog import EXIT_HUNG, EXIT_USAGE

_ATTEMPTS = 6
_LEAST_S = 5.0  # a process that has less time left would only start
_CPU_SLOWER = 4
_REAP_S = 10.0  # a killed process may wait for its device
_SANITIZER = ("compute-sanitizer", "--error-exitcode", "99")


@dataclass(frozen=True)
class Stage:
    """One process, killed after ``seconds``.

    ``patience``: seconds without progress after which it ends itself; ``under``: a tool that runs
    it; ``interpreted``: on a CPU, Triton runs in its interpreter.
    """

    name: str
    seconds: float
    patience: float = 30.0
    under: tuple[str, ...] = ()
    interpreted: bool = False


# The last one prints the summary and always runs; ``stages`` has their work.
SUMMARY = Stage("summary", 20)
STAGES = (
    Stage("facts", 60),
    Stage("precompile", 90, patience=90),
    Stage("portable", 60, patience=20, interpreted=True),
    Stage("candidates", 60, patience=20, interpreted=True),
    Stage("memcheck", 60, patience=60, under=_SANITIZER),
    Stage("forward", 90),
    Stage("backward", 120),
    Stage("sweep", 120),
    Stage("flex-attention", 240, patience=200),
    SUMMARY,
)


def conduct(
    stages: Sequence[Stage], path: Path, minutes: float, options: Sequence[str], device: str
) -> int:
    """Runs ``stages``, which append to ``path``, within ``minutes``; ``options`` go to all of them.

    Returns 0; 1 if the summary has failures or a stage failed; 2 at once if one says that the
    command line or the machine is wrong.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the stage under way too
    until = time.monotonic() + 60 * minutes
    failed = False
    for stage in stages:
        began = time.monotonic()
        slower = _CPU_SLOWER if device == "cpu" else 1
        kept = 0 if stage is SUMMARY else SUMMARY.seconds
        end = min(until - kept, began + slower * stage.seconds)
        outcome, code = _outcome(stage, path, end, options, device)
        if code == EXIT_USAGE:
            return code
        failed |= code != 0
        fact = {"fact": "stage", "stage": stage.name, "outcome": outcome,
                "s": round(time.monotonic() - began, 1)}  # fmt: skip
        with path.open("a", encoding="utf-8") as file:
            print(json.dumps(fact), file=file)
        print(f"stage {stage.name}: {outcome}, {fact['s']} s", flush=True)
    return int(failed)


def _outcome(
    stage: Stage, path: Path, end: float, options: Sequence[str], device: str
) -> tuple[str, int]:
    """Runs one stage, again after a hang; returns its outcome and exit code."""
    if stage.under and not shutil.which(stage.under[0]):
        return f"skipped, {stage.under[0]} is not installed", 0
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = str(int(stage.interpreted))
    for _ in range(_ATTEMPTS):
        left = end - time.monotonic()
        if left < _LEAST_S:
            return "no time left", 0
        code = _run([
            *stage.under, sys.executable, "-m", "ringray_kernels.bench", "--stage", stage.name,
            "--resume", str(path), "--minutes", str(0.9 * left / 60), "--patience",
            str(stage.patience), "--device", device, *options,
        ], environment, left)  # fmt: skip
        if code is None:
            return "ended at its limit", 0
        if code in (0, 1, EXIT_USAGE):
            return "failed" if code else "done", code
        if code != EXIT_HUNG:
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            return f"failed with {how}", 1
    return f"hung {_ATTEMPTS} times", 1


def _run(command: Sequence[str], environment: dict[str, str], seconds: float) -> int | None:
    """Returns the exit code of a command, or None if it took longer than ``seconds``; leaves
    nothing of its process group."""
    child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_REAP_S)
