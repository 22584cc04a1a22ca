"""Runs fuzzed specs through ``load`` and ``build``: each makes sense or is refused in good words.

python -m tests.fuzz.runner SEED INDEX      # one case again: its bytes and what came of it
python -m tests.fuzz.runner SEED 0-9999     # many, shared among the cores
"""

from __future__ import annotations

import json
import math
import os
import re
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
from typing import Any

from ringray.base.errors import SpecError
from ringray.lab.plan.plan import Plan, build
from ringray.lab.predict import hardware
from ringray.lab.specs.model import Spec, load, parse
from tests.fuzz.generate import make

CPU_S = 120.0  # of one case; 100,000 points, the most that a plan has, take about 20
MEMORY = 8 << 30  # of address space, of which libraries reserve most
CHUNK = 250
MOST_POINTS = 100_000
OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # by a terminal


class Hang(BaseException):
    """A case took more CPU time than it may; no handler of errors catches it."""


@dataclass
class Results:
    """Results of some cases. ``wrong``: index and what is wrong; ``slowest``: seconds of CPU time
    and index."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[int, str]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)

    def report(self, seed: int) -> str:
        """Returns the counts, and of what is wrong the first few with how to see them again."""
        counts = ", ".join(f"{count:,} {what}" for what, count in sorted(self.counts.items()))
        lines = [f"seed {seed}: {counts}, {len(self.wrong)} wrong"]
        lines.append(f"slowest: {self.slowest[0]:.1f} s of CPU time, index {self.slowest[1]}")
        for index, trace in self.wrong[:10]:
            lines += ["", f"python -m tests.fuzz.runner {seed} {index}", trace[-3000:]]
        return "\n".join(lines)


def check_accepted(spec: Spec, plan: Plan) -> None:
    """Fails where the spec or its plan is nonsense."""
    canonical = spec.canonical()
    again = parse(json.dumps(canonical, allow_nan=False), "again.yaml")
    assert again.digest == spec.digest, "the canonical form has another digest"
    assert again.canonical() == canonical, "the canonical form means something else"
    keys = [trial.key for trial in plan.trials]
    assert len(set(keys)) == len(keys), "two trials have one key"
    assert [trial.index for trial in plan.trials] == list(range(len(keys)))
    assert 0 < len(keys) <= MOST_POINTS
    for trial in plan.trials[:: max(1, len(keys) // 60)]:
        assert trial.pruned or trial.predicted, "neither pruned nor predicted"
        if trial.predicted is not None:
            check_cost(trial.config.as_dict(), trial.predicted)


def check_cost(config: dict[str, Any], cost: Any) -> None:
    """Fails where a prediction cannot be, as the sizes of the problem alone show."""
    for name, value in cost._asdict().items():
        assert math.isfinite(value), f"{name} is {value}"
        assert value >= 0, f"{name} is {value}"
    assert cost.time_ms > 0
    assert 0 < cost.balance <= 1 + 1e-9, f"balance {cost.balance}"
    assert (cost.sent_bytes == 0) == (cost.messages == 0)
    assert config["ring_size"] > 1 or cost.sent_bytes == 0, "a ring of one sends"
    assert cost.peak_memory_bytes < 2**60, "more than any machine has"
    if "model" not in config:
        assert config["heads"] % config["kv_heads"] == 0, "heads do not divide"
        rows = -(-config["seq_len"] // config["ring_size"])
        keys = rows * config["batch"] * config["kv_heads"] * config["head_dim"]
        assert cost.peak_memory_bytes >= keys, f"{cost.peak_memory_bytes} bytes are too few"


def check_refused(message: str, path: str) -> None:
    """Fails where a refusal is not fit for a person: each line names the file, and none holds what
    a terminal would obey."""
    lines = message.splitlines()
    assert lines
    for line in lines:
        assert line.startswith(path), f"a line does not name the file: {line!r}"
        assert not OBEYED.search(line), f"a terminal would obey {line!r}"
    assert len(message) < 40_000, "an error of more than a few pages"
    assert "pydantic" not in message
    message.encode()


def run(seed: int, index: int, path: Path) -> str:
    """Returns ``accepted``, ``refused spec`` or ``refused plan``; raises anything that is wrong."""
    path.write_bytes(make(seed, index))
    fleet = hardware.gpus() if index % 3 == 0 else hardware.cpu(2)
    stage = "spec"
    try:
        spec = load(path)
        stage = "plan"
        plan = build(spec, fleet)
    except SpecError as error:
        check_refused(str(error), str(path))
        return f"refused {stage}"
    check_accepted(spec, plan)
    return "accepted"


def run_some(seed: int, indices: range) -> Results:
    """Runs several cases in this process, each within ``CPU_S`` of CPU time."""

    def late(*_: Any) -> None:
        raise Hang(f"more than {CPU_S:g} s of CPU time")

    results = Results()
    before = signal.signal(signal.SIGPROF, late)
    with tempfile.TemporaryDirectory(prefix="ringray-fuzz-") as folder:
        for index in indices:
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            try:
                results.counts[run(seed, index, Path(folder) / "f.yaml")] += 1
            except (Exception, Hang):
                results.wrong.append((index, traceback.format_exc()))
            signal.setitimer(signal.ITIMER_PROF, 0)
            results.slowest = max(results.slowest, (time.process_time() - began, index))
    signal.signal(signal.SIGPROF, before)
    return results


def _run_bounded(seed: int, indices: range) -> Results:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    return run_some(seed, indices)


def run_many(seed: int, indices: range) -> Results:
    """Runs all cases, shared among processes of bounded memory."""
    results = Results()
    chunks = [indices[first : first + CHUNK] for first in range(0, len(indices), CHUNK)]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for part in pool.map(_run_bounded, [seed] * len(chunks), chunks):
            results.counts += part.counts
            results.wrong += part.wrong
            results.slowest = max(results.slowest, part.slowest)
    return results


def main(arguments: list[str]) -> int:
    """Returns 1 if anything is wrong."""
    seed, (first, _, last) = int(arguments[0]), arguments[1].partition("-")
    if last:
        results = run_many(seed, range(int(first), int(last) + 1))
    else:
        print(make(seed, int(first)))
        results = run_some(seed, range(int(first), int(first) + 1))
    print(results.report(seed))
    return 1 if results.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
