"""Records in MLflow: names, notes, tables; and its addresses."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.report import verdict
from ringray.lab.store.store import Store
from ringray.lab.tracking import location as place
from ringray.lab.tracking import mlflow_record as show
from ringray.lab.tracking.worker import environment
from ringray.lab.trial.faults import Fault
from ringray.lab.trial.outcome import Tracked, TrialRow
from tests.support.figure_rows import row as drawn_row
from tests.support.figure_rows import strategies, timed
from tests.support.ray_heads import free_ports
from tests.support.tracking_store import ENVIRONMENT, begin, config, outcome


def row(index: int, status: Any = "ok", **changes: Any) -> TrialRow:
    end = outcome(index, status)
    return TrialRow(
        f"{index:016x}", index, config(index) | changes, {}, status, end.reason,
        dict(end.metrics), {}, end.point, 1, end.started, end.ended, ENVIRONMENT,
    )  # fmt: skip


@pytest.fixture
def sweep_row(tmp_path: Path) -> Any:
    with Store(tmp_path / "s.db") as store:
        begin(store, [])
        return store.find("quick")


def test_a_name_says_what_varies(sweep_row: Any) -> None:
    rows = [row(0), row(2, ring_size=4, dtype="bfloat16", direction="forward+backward")]
    assert list(show.run_names(sweep_row, rows).values()) == [
        "contiguous ring2 forward float32",
        "zigzag ring4 forward+backward bfloat16",
    ]
    rows = [
        row(0, window=7, documents=[1, 2], blocks=128, causal=True, kv_heads=2),
        row(4, documents=3, causal=False, replica=1),
    ]
    assert list(show.run_names(sweep_row, rows).values()) == [
        "1024 kv2 causal window7 docs-2:3a316d blocks128 replica0",
        "2048 kv8 full no-window docs3 default-blocks replica1",
    ]
    rows = [row(0, blocks="forward=64x64/4/2,dq=64x64/4/2"), row(1)]
    names = list(show.run_names(sweep_row, rows).values())
    assert names == ["contiguous blocks-forward=64x64/4/2,dq=64x64/4/2", "striped default-blocks"]
    names = list(show.run_names(sweep_row, [row(0, pool=True), row(1, pool=None)]).values())
    assert names == ["contiguous pool", "striped no-pool"]
    assert list(show.run_names(sweep_row, [row(0)]).values()) == ["latency"]


def test_params_metrics_and_tags_fit_mlflow(sweep_row: Any) -> None:
    odd = {"window": None, "causal": True, "documents": {"lengths": list(range(9999))}, "a=b": "x"}
    found = show.params(odd)
    assert found["window"] == "null"
    assert found["causal"] == "true"
    assert len(found["documents"]) == 6000
    assert found["a_b"] == "x"
    assert show.finite({"a": math.inf, "b": math.nan, "c": 1}) == {"c": 1.0}
    tags = show.trial_tags(sweep_row, row(1, "failed"), "parent")
    assert tags["ringray.status"] == "failed"
    assert tags["ringray.reason"] == "it failed"
    assert tags["hardware.gpus"] == "A, B"
    assert tags["versions.torch"] == "2.13.0"
    assert "versions.triton" not in tags
    assert tags["git.dirty"] == "true"
    assert show.tag_texts({"a": "x\0y" + "z" * 9000, "b": None, "c": ""}) == {
        "a": "x y" + "z" * 7997
    }


def test_what_a_trial_met_can_be_searched_for(sweep_row: Any) -> None:
    assert "ringray.fault.kind" not in show.trial_tags(sweep_row, row(1), "parent")
    met = [("rank-died", "10.0.0.2 (node a)"), ("node-lost", "10.0.0.3 (node b)"),
           ("rank-died", "10.0.0.2 (node a)"), ("mismatch", "")]  # fmt: skip
    faults = [Fault(kind, "why", node=node).as_dict() for kind, node in met]
    trial = replace(row(1), environment={"faults": faults})
    tags = show.trial_tags(sweep_row, trial, "parent")
    assert tags["ringray.fault.kind"] == "rank-died, node-lost, mismatch"
    assert tags["ringray.fault.node"] == "10.0.0.2 (node a), 10.0.0.3 (node b)"


def test_the_note_has_the_answer_in_the_words_of_the_terminal_and_the_figures(
    sweep_row: Any,
) -> None:
    place_of_run = Tracked("", "7", "cd" * 16)
    many = [drawn_row(n, timed(9.0 + n % 2), seq_len=1024 * (1 + n // 2), partition=name)
            for n, name in enumerate(["contiguous", "zigzag"] * 14)]  # fmt: skip
    for rows in (strategies(), many, [row(0, "failed")], [replace(row(0), status=None)]):
        note = show.note(sweep_row, rows, place_of_run, ())
        above, title, below = note.partition("**quick** (latency): ")
        assert title
        assert [line for line in above.splitlines() if line] == verdict.lines(rows)
    assert below.startswith("0 of 1 trials ended: nothing")
    note = show.note(sweep_row, strategies(), place_of_run, ("throughput", "pareto"))
    assert len(note) <= 8000
    assert "16 of 16 trials ended: 16 ok" in note
    run = "cd" * 16
    links = dict(re.findall(r"(?<!!)\[([^]]+)\]\((\S+)\)", note))
    assert set(links) == {"table", "charts", "report"}
    assert links["report"] == f"#/experiments/7/runs/{run}/artifacts/report.html?{place.MODE}"
    page, _, query = links["charts"].partition("?")
    assert page == "#/experiments/7/runs"
    view = parse_qs(query)
    assert (view["compareRunsMode"], view["orderByKey"]) == (["CHART"], ["metrics.`ratio`"])
    assert view["searchFilter"] == [
        f'tags.`mlflow.parentRunId` = "{run}" AND tags.`ringray.current` = "true"'
    ]
    assert re.findall(r"!\[([^]]+)\]\((\S+)\)", note) == [
        ("Throughput by length", f"get-artifact?path=figures%2Fthroughput.png&run_uuid={run}"),
        ("Time against memory", f"get-artifact?path=figures%2Fpareto.png&run_uuid={run}"),
    ]


def test_the_sweep_says_how_far_its_predictions_were_off(sweep_row: Any) -> None:
    predicted = [{"time_ms": 0.8}, {"time_ms": 1.25}, {"time_ms": 1.0}, {}]
    rows = [
        replace(row(index), predicted=one, metrics={"median_ms": 1.0})
        for index, one in enumerate(predicted)
    ]
    found = show.summary_metrics([*rows, row(4, "failed")])
    assert found["prediction_trials"] == 3
    assert found["prediction_median_error"] == pytest.approx(0.25)
    ratios = [line.get("prediction_ratio") for line in show.results_rows(sweep_row, rows)]
    assert ratios == [1.25, 0.8, 1.0, None]
    assert "prediction_trials" not in show.summary_metrics([row(0)])


def test_tables_have_a_row_per_ended_trial(sweep_row: Any) -> None:
    ended = replace(row(0, repeats=9), metrics={"median_ms": 1.0, "repeats": 5.0})
    rows = show.results_rows(sweep_row, [ended, row(1, "failed", repeats=9)])
    header, measured, failed = (line.split(",") for line in show.results_csv(rows).splitlines())
    assert header[:4] == ["trial", "key", "status", "reason"]
    assert len(header) == len(measured) == len(failed) == len({*header})
    assert failed[header.index("median_ms")] == ""
    # What the spec asks for has no column beside what was measured.
    assert [line[header.index("repeats")] for line in (measured, failed)] == ["5.0", ""]


def test_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert place.resolve_uri(None) == f"sqlite:///{tmp_path}/mlflow.db"
    assert place.resolve_uri("sqlite:///sub/x.db") == f"sqlite:///{tmp_path}/sub/x.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    assert place.resolve_uri(None) == "http://host:5000"
    assert place.resolve_uri("https://other") == "https://other"
    assert place.artifact_root("https://other") is None
    # A database alone has no place for files, and the working directory is nobody's choice.
    assert place.artifact_root("postgresql://db/mlflow") == f"{tmp_path}/artifacts"
    assert place.ui_command("http://u:p@host:5000/", "1", "r") == (
        "http://host:5000/#/experiments/1/runs/r?workflowType=machine_learning"
    )
    command = place.ui_command("sqlite:////a b/m.db")
    assert command.endswith("ui --backend-store-uri 'sqlite:////a b/m.db' --host 127.0.0.1")
    assert place.ui_command("sqlite:////m.db", "1", "r").endswith(
        f"--host 127.0.0.1\nthen open http://127.0.0.1:5000/#/experiments/1/runs/r?{place.MODE}"
    )
    assert "secret" not in place.ui_command("postgresql://me:secret@db/mlflow")


def test_a_place_that_cannot_be_used_is_named_at_once(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_text("no database at all " * 99)
    Store(tmp_path / "store.db").close()
    (port,) = free_ports(1)
    for uri, why in {
        f"http://u:hush@127.0.0.1:{port}": "no MLflow server answers at .*refused.*start",
        "http://": "names no host",
        "sqlite://": "names no file: expected sqlite:///PATH",
        "sqlite:///:memory:": "names no file",
        f"sqlite:///{tmp_path}": "unable to open database file",
        f"sqlite:///{text}": "cannot be used: file is not a database",
        f"sqlite:///{tmp_path}/store.db": "belongs to another program",
        f"sqlite:///{text}/below.db": "cannot be opened",
        "sqlite:////proc/nowhere/m.db": "cannot be opened",
        "./mlruns": "expected http://HOST:PORT, https://..., sqlite:///PATH, postgresql://",
        "file:///tmp/mlruns": "no longer supports plain folders",
        "ftp://host": "has an unknown scheme",
    }.items():
        with pytest.raises(PlaceError, match=why) as error:
            place.check(uri)
        assert "tracking.uri" in str(error.value)
        assert "hush" not in str(error.value)
    place.check(f"sqlite:///{tmp_path}/new/m.db")


def test_netrc_is_for_the_server_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000/mlflow")
    assert "NETRC" not in environment("http://127.0.0.1:5000", 1.0)
    assert environment("http://127.0.0.1:9", 1.0)["NETRC"] == os.devnull
    assert "NETRC" not in environment("wandb://team", 1.0), "its key is there"
