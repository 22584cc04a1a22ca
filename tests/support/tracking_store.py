"""Shared by the tests of tracking: a sweep to record, its store, and its runs in MLflow."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringray.lab.store.store import Store
from ringray.lab.tracking import location as place
from ringray.lab.tracking import mlflow_record as show
from ringray.lab.trial.outcome import Outcome, SweepInfo, TrialInfo

DIGEST = "cafe" * 16
ENVIRONMENT = {
    "hardware": {"cpu": "AMD", "cores": 2, "memory_bytes": 1 << 33, "gpus": ["A", "B"]},
    "versions": {"torch": "2.13.0", "triton": None},
    "git": {"commit": "f" * 40, "dirty": True},
    "os": "Linux",
    "python": "3.11",
    "code": "c" * 64,
    "kernels": "k" * 64,
}
PARTITIONS = ("contiguous", "striped", "zigzag", "zigzag-token")


def config(index: int) -> dict[str, Any]:
    return {
        "ring_size": 2, "device": "cpu", "placement": "pack", "threads": 1,
        "seq_len": 1024 * (1 + index // 4), "batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64,
        "dtype": "float32", "causal": True, "window": None, "documents": None,
        "direction": "forward", "partition": PARTITIONS[index % 4], "transport": "ring",
        "backward": "auto", "backend": "auto", "blocks": None, "warmup": 1, "repeats": 5,
        "replica": 0, "seed": 0, "baseline": "sdpa", "baseline_threads": 2,
    }  # fmt: skip


def trials(count: int, pruned: tuple[int, ...] = ()) -> list[TrialInfo]:
    return [
        TrialInfo(
            f"{index:016x}", index, config(index), {"time_ms": 1.0},
            "too large" if index in pruned else None,
        )
        for index in range(count)
    ]  # fmt: skip


def outcome(index: int, status: Any = "ok", shift: float = 0.0) -> Outcome:
    metrics = {"median_ms": index + 1.0 + shift, "ratio": 0.9 + index / 100, "tflops": 0.5}
    metrics |= {f"extra_{number}": number / 7 for number in range(11)} | {"bad": math.inf}
    return Outcome(
        status, None if status == "ok" else f"it {status}", metrics if status == "ok" else {},
        {"ms": [1.0] * 5}, f"{index:064x}", 1, 1e9 + index + shift, 1e9 + index + shift + 0.5,
    )  # fmt: skip


def begin(store: Store, planned: list[TrialInfo]) -> None:
    spec = {"name": "quick", "kind": "latency"}
    store.begin(SweepInfo(DIGEST, "quick", "latency", spec, "name: quick\n", ENVIRONMENT), planned)


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, schema: Path) -> Iterator[Store]:
    """A store in a home of its own, beside a copy of the MLflow database; for fixtures."""
    monkeypatch.setenv("RINGRAY_HOME", str(folder))
    (folder / "mlflow.db").write_bytes(schema.read_bytes())
    with Store(folder / "store.db") as store:
        yield store


def make_schema(folder: Path) -> Path:
    """An empty MLflow database, to be copied: making it takes 2 s."""
    path = folder / "mlflow.db"
    client(f"sqlite:///{path}").search_experiments()
    return path


def client(uri: str | None = None) -> Any:
    """A client of the tracking server at ``uri``, by default the one in $RINGRAY_HOME."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri or place.resolve_uri(None))


def runs(
    uri: str | None = None, experiment: str = "quick", store: str | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """MLflow's parent runs, and its current child runs by trial key, of one store or of all; fails
    on a double."""
    mlflow = client(uri)
    found = mlflow.get_experiment_by_name(experiment)
    if found is None:
        return [], {}
    parents, children = [], {}
    for run in mlflow.search_runs([found.experiment_id], max_results=50_000):
        if store is not None and run.data.tags["ringray.store"] != store:
            continue
        if run.data.tags["ringray.role"] == "sweep":
            parents.append(run)
            continue
        key = run.data.tags["ringray.key"]
        if run.data.tags["ringray.current"] == "false":
            continue
        assert key not in children, f"trial {key} is in MLflow twice"
        children[key] = run
    return parents, children


def check_complete(store: Store, uri: str | None = None, experiment: str = "quick") -> None:
    """One parent, and one up-to-date child per measured trial with every metric once."""
    mlflow = client(uri)
    parents, children = runs(uri, experiment)
    assert len(parents) == 1
    ended = {row.key: row for row in store.trials(DIGEST) if row.status not in (None, "pruned")}
    assert set(children) == set(ended)
    for key, run in children.items():
        assert run.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
        assert run.data.tags["ringray.record"] == show.record_digest(ended[key])
        assert run.data.metrics == show.run_metrics(ended[key])
        assert run.info.status in ("FINISHED", "FAILED")
        for name in list(run.data.metrics)[:2]:
            assert len(mlflow.get_metric_history(run.info.run_id, name)) == 1


def wait_for(condition: Callable[[], Any], seconds: float = 900.0, pause: float = 0.02) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(pause)
