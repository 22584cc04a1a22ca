"""A sweep in Weights & Biases, without a network: its own files are read back."""

from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ringray.base.errors import PlaceError, SpecError
from ringray.lab.specs.model import parse
from ringray.lab.store.store import Store
from ringray.lab.tracking import mlflow_record as show
from ringray.lab.tracking.location import check
from ringray.lab.tracking.tracker import Tracker, sync
from ringray.lab.trial.outcome import SyncState
from tests.support.place import PATIENCE
from tests.support.small_spec import SMALL
from tests.support.tracking_store import DIGEST, begin, outcome, trials

BLOCK = 1 << 15  # bytes, of the file's format (LevelDB's log)


def test_a_spec_names_it() -> None:
    def uri_of(section: str) -> str | None:
        return parse(SMALL.replace("{enabled: false}", section)).tracking.uri

    assert uri_of("{to: wandb}") == "wandb://"
    assert uri_of("{to: wandb, uri: 'wandb://team'}") == "wandb://team"
    assert uri_of("{to: mlflow}") is None
    with pytest.raises(SpecError, match=r"tracking.uri: got .*, expected wandb://"):
        uri_of("{to: wandb, uri: 'http://127.0.0.1:5000'}")
    with pytest.raises(SpecError, match="expected one of mlflow, wandb"):
        uri_of("{to: wandbs}")


def test_it_is_missed_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringray.lab.tracking.wandb_sink.find_spec", lambda name: None)
    with pytest.raises(PlaceError, match=r"pip install 'ringray\[wandb\]'"):
        check("wandb://")


def _records(path: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, start, parts, records = path.read_bytes(), 7, b"", []
    while start + 7 <= len(data):
        if BLOCK - start % BLOCK < 7:  # a header does not cross the end of a block
            start += BLOCK - start % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, start + 4)
        parts += data[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def _runs(home: Path) -> dict[str, dict[str, Any]]:
    """Returns each run as it was written last, by its id."""
    runs = {}
    for path in sorted(home.glob("wandb/offline-run-*/run-*.wandb")):
        made: dict[str, Any] = {"summary": {}, "history": [], "folder": path.parent / "files"}
        for record in _records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                made["run"] = record.run
                made["config"] = {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            elif kind == "summary":
                for item in record.summary.update:
                    made["summary"][item.key or item.nested_key[0]] = json.loads(item.value_json)
            elif kind == "history":
                items = record.history.item
                values = {item.key or item.nested_key[0]: item.value_json for item in items}
                made["history"].append({name: json.loads(text) for name, text in values.items()})
            elif kind == "exit":
                made["exit"] = record.exit.exit_code
        runs[made["run"].run_id] = made
    return runs


@pytest.mark.skipif(find_spec("wandb") is None, reason="pip install 'ringray[wandb]'")
def test_a_sweep_is_a_group_with_a_run_per_trial(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    planned = trials(4, pruned=(3,))
    begin(store, planned)
    tracker = Tracker(store.path, DIGEST, "wandb://team", "quick").start()
    tracker.wait_ready()
    for index, status in enumerate(("ok", "ok", "failed")):
        store.record(DIGEST, planned[index].key, outcome(index, status))
    store.finish(DIGEST, "complete")
    assert tracker.finish(PATIENCE) == SyncState(4, 0, None)
    assert tracker.ui_command == f"wandb sync {tmp_path}/wandb/offline-run-*"
    runs = _runs(tmp_path)
    assert len(runs) == 4
    parent = runs.pop(tracker.place.run_id)
    assert {run["run"].run_group for run in (parent, *runs.values())} == {f"quick-{DIGEST[:12]}"}
    assert (parent["run"].project, parent["run"].entity) == ("quick", "team")
    assert (parent["run"].job_type, parent["exit"]) == ("sweep", 0)
    assert parent["summary"].items() >= {"trials_ok": 2.0, "best_ratio": 0.9}.items()
    files = {path.name for path in parent["folder"].iterdir()}
    assert files >= {"spec.yaml", "results.csv", "report.html"}
    named = {run["run"].display_name: run for run in runs.values()}
    rows = {row.index: row for row in store.trials(DIGEST)}
    names = show.run_names(store.find(DIGEST), rows.values())
    for index, status in enumerate(("ok", "ok", "failed")):
        run, row = named[names[rows[index].key]], rows[index]
        assert run["config"].items() >= row.config.items()
        assert run["summary"].items() >= show.run_metrics(row).items()
        assert set(run["run"].tags) == {"current", status}
        assert run["exit"] == (status == "failed")

    # Measured again: another run, and the earlier one says so. Nothing else is written again.
    store.record(DIGEST, planned[0].key, outcome(0, shift=100.0))
    assert sync(store.path, DIGEST, "wandb://team", "quick") == SyncState(4, 0, None)
    after = _runs(tmp_path)
    assert len(after) == 5
    same = [run for run in after.values() if run["run"].display_name == names[rows[0].key]]
    assert sorted(sorted(run["run"].tags) for run in same) == [["current", "ok"], ["earlier", "ok"]]
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 4 + 3
