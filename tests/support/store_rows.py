"""A sweep and its trials for tests of the store."""

from __future__ import annotations

from ringray.lab.trial.outcome import Outcome, SweepInfo, TrialInfo

DIGEST = "ab12" * 16
OTHER = "ab34" * 16
ENVIRONMENT = {"hardware": {"cpu": "x", "cores": 2}, "versions": {"torch": "2"}, "kernels": "k"}


def sweep(digest: str = DIGEST, name: str = "quick", environment: dict | None = None) -> SweepInfo:
    return SweepInfo(
        digest, name, "latency", {"name": name}, f"name: {name}\n", environment or ENVIRONMENT
    )


def trial(index: int, pruned: str | None = None) -> TrialInfo:
    return TrialInfo(f"{index:016x}", index, {"seq_len": 64 + index}, {"flops": 9}, pruned)


def ok(index: int, attempts: int = 1, started: float = 5.0) -> Outcome:
    return Outcome(
        "ok", None, {"median_ms": 1.5 + index}, {"ms": [1.0, 2.0]}, "p" * 64, attempts, started, 9.0
    )
