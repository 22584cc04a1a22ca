"""A store with a sweep that a report shows: all figures of strategies, faults and hostile texts."""

from __future__ import annotations

from pathlib import Path

from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome, SweepInfo, TrialInfo
from tests.support import figure_rows

DIGEST = "cd34" * 16
EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil=1'>"
ENVIRONMENT = {
    "os": "Linux",
    "hardware": {"cpu": f"a CPU {EVIL}", "cores": 2},
    "versions": {"torch": "2.13"},
    "git": {"commit": "abc123", "dirty": False},
}


def write(path: Path, name: str = "which-ring", digest: str = DIGEST) -> Path:
    """Writes 16 measured trials, one that ran out of memory and one that failed."""
    rows = [*figure_rows.predictions()]
    rows += [figure_rows.row(16 + i, {}, s, seq_len=16384) for i, s in enumerate(("oom", "failed"))]
    source = f"name: {name}\n# {EVIL}\n"
    with Store(path) as store:
        infos = [TrialInfo(one.key, one.index, one.config, one.predicted) for one in rows]
        store.begin(SweepInfo(digest, name, "latency", {"name": name}, source, ENVIRONMENT), infos)
        for one in rows:
            samples = {"ms": [one.metrics["median_ms"]] * 5} if one.metrics else {}
            reason = None if one.status == "ok" else f"it broke {EVIL}"
            attempts = 3 if one.status == "failed" else 1
            store.record(
                digest, one.key,
                Outcome(one.status or "ok", reason, one.metrics, samples, f"{one.index:064x}",
                        attempts, 1e9, 1e9 + 1),
            )  # fmt: skip
        store.finish(digest, "failed")
    return path
