"""``ringray run`` and ``resume``, on rings that measure nothing; and the same from Python."""

from __future__ import annotations

import io
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringray import lab
from ringray.base.errors import PlaceError, SpecError, UserError
from ringray.lab import cli
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store, default_path
from ringray.lab.trial.outcome import Outcome, SweepInfo
from tests.support.small_spec import SMALL, fill
from tests.support.sweep_world import THREE, Rings, machine, stand_in


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    return stand_in(monkeypatch, machine())


def test_run_prints_lines_and_a_summary(
    small: str, home: Path, addresses: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", small, "--address", "ray://somewhere:1"]) == 0
    out = capsys.readouterr().out
    assert "small " in out
    assert "[1/6] contiguous causal no-window  ok  1.00 ms" in out
    assert "6 ok · 2 pruned" in out
    assert f"store:  {home / 'store.db'}" in out
    assert "answer: causal no-window: not decided: too few runs to tell contiguous and" in out
    assert addresses == ["ray://somewhere:1"]
    for options, takes in (["--again"], 6), ([], 0):
        assert cli.main(["run", small, *options]) == 0
        assert capsys.readouterr().out.count("  ok  ") == takes + 6  # and in the table


def test_json_to_stdout_leaves_stdout_to_the_records(
    small: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", small, "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert [line[:10] for line in out.splitlines()] == ['{"point": '] * 8
    assert "6 ok" in err


def test_an_interrupted_run_says_how_to_go_on(
    small: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ringray.lab.cluster.connect.connect", interrupted)
        assert cli.main(["run", small]) == 130
    assert "interrupted before the first record" in capsys.readouterr().out
    monkeypatch.setattr(Rings, "most", 2)
    assert cli.main(["run", small, "--store", str(home / "other.db")]) == 130
    out = capsys.readouterr().out
    assert f"continue with: ringray resume small --store {home / 'other.db'}" in out
    assert "4 pending" in out
    assert len(re.findall(r"^\d+ +(contiguous|zigzag) ", out, re.M)) == 2  # of what was measured
    monkeypatch.setattr(Rings, "most", 9)
    assert cli.main(["resume", "small", "--store", str(home / "other.db")]) == 0
    out = capsys.readouterr().out
    assert "6 trials, 2 trials measured before" in out
    assert "[3/6]" in out
    assert "[2/6]" not in out


def test_a_sweep_is_resumed_from_its_meaning_when_its_source_reads_differently(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan.build(spec.parse(SMALL))
    with Store(default_path()) as store:
        described: dict[str, Any] = {}
        canonical = made.spec.canonical()
        source = SMALL.replace("seq_len: 64", "seq_len: 128")
        begun = SweepInfo(made.digest, "small", "latency", canonical, source, described)
        store.begin(begun, [])
    assert cli.main(["resume", "small", "--set", "limits.retries=0"]) == 0
    assert made.digest[:12] in capsys.readouterr().out
    assert cli.main(["resume", "small", "--set", "problem.heads=4"]) == 2
    assert "problem.heads=4 makes another sweep of small" in capsys.readouterr().err
    with Store(default_path()) as store:
        other = {**canonical, "problem": {**canonical["problem"], "seq_len": 32}}
        store.begin(SweepInfo(made.digest, "small", "latency", other, source, described), [])
    assert cli.main(["resume", "small"]) == 2
    assert "another version of ringray" in capsys.readouterr().err


def test_rings_that_no_machine_holds_are_refused_before_anything_begins(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "huge.yaml"
    for sizes, code in (("[8, 16]", 2), ("[2, 8]", 0)):
        path.write_text(f"{SMALL}ring: {{size: {sizes}, device: cpu}}\n")
        assert cli.main(["run", str(path), "--no-tracking"]) == code
        out, err = capsys.readouterr()
        if code:
            assert f"{path}:" in err
            assert "a ring of 8 needs 8 CPUs" in err
            with Store(default_path()) as store:
                assert store.sweeps() == []
        else:
            assert "6 ok · 10 pruned" in out


# ``limits.gpu_hours``: a sweep stops before the trial that would exceed it


@pytest.fixture
def limited(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A sweep of three trials, each of which takes a ring of two for a second."""
    monkeypatch.setattr(Rings, "took_s", 1.0)
    path = tmp_path / "s.yaml"
    path.write_text(f"{THREE}limits: {{gpu_hours: 0.001}}\n")  # 3.6 rank seconds
    return str(path)


def test_it_stops_before_the_trial_and_goes_on_with_more(
    limited: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # a second time what the store has counts
        assert cli.main(["run", limited]) == 4
        out = capsys.readouterr().out
        assert "2 ok · 1 pending" in out
        assert "stopped: limits.gpu_hours is 0.001, 0.00111 are used and the next trial" in out
        assert "continue with: ringray resume s" in out
    assert cli.main(["status", "s"]) == 0
    assert "interrupted" in capsys.readouterr().out
    assert cli.main(["resume", "s", "--set", "limits.gpu_hours=0.002"]) == 0
    assert "3 ok" in capsys.readouterr().out
    assert cli.main(["resume", "s"]) == 0, "nothing is left to do"


def test_earlier_measurements_count(limited: str) -> None:
    limit = ["--set", "limits.gpu_hours=0.0025"]  # 9 rank seconds
    assert cli.main(["run", limited, *limit]) == 0
    assert cli.main(["run", limited, *limit, "--again"]) == 4
    with Store(default_path()) as store:
        assert len(store.history(store.find("s").digest)) == 2


# Files for output


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


@pytest.mark.parametrize("name", ["s.db", "link.jsonl", "hard.jsonl", "home/mlflow.db", "home"])
def test_no_output_follows_a_link_or_replaces_an_input(
    small: str, home: Path, addresses: list[str | None], name: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(home.parent)
    fill("s.db", SMALL)
    home.mkdir()
    (home / "mlflow.db").touch()
    Path("link.jsonl").symlink_to("nowhere")
    os.link("s.db", "hard.jsonl")
    before = Path("s.db").read_bytes()
    for line in (["run", small], ["status", "small"], ["plan", small]):
        text = _refused(capsys, *line, "--store", "s.db", "--json", name)
        assert f"--json {name}: is a" in text
        assert not Path("nowhere").exists()
    assert Path("s.db").read_bytes() == before
    assert addresses == [], "nothing ran"


def test_a_job_keeps_nothing_in_its_own_folder(
    home: Path, addresses: list[str | None], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Not the store, not the lines, not MLflow's database."""
    folder = home.parent / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    (folder / "small.yaml").write_text(
        SMALL.replace("tracking: {enabled: false}", "tracking: {uri: 'sqlite:///m.db'}")
    )
    monkeypatch.chdir(folder)
    for options in (["--store", "s.db"], ["--json", "a.jsonl", "--no-tracking"], []):
        assert "of a Ray job" in _refused(capsys, "run", "small.yaml", *options)
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]
    assert addresses == []


# From Python


@pytest.mark.parametrize("form", ["path", "name", "text", "data"])
def test_a_spec_is_a_path_a_text_or_data(
    form: str, small: str, home: Path, addresses: list[str | None]
) -> None:
    forms = {"path": Path(small), "name": small, "text": SMALL, "data": yaml.safe_load(SMALL)}
    summary = lab.run(forms[form], changes=["problem.heads=4"])
    assert (summary.exit_code, summary.measured, summary.counts) == (0, 6, {"ok": 6, "pruned": 2})
    assert summary.digest == spec.parse(SMALL.replace("heads: 2", "heads: 4")).digest
    assert addresses == [None]
    assert lab.results("small").attrs["digest"] == summary.digest
    assert (home / "store.db").exists()


def test_options_reach_the_driver_and_the_view(
    tmp_path: Path,
    home: Path,
    addresses: list[str | None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view, store, lines = io.StringIO(), tmp_path / "other.db", tmp_path / "a.jsonl"
    lab.run(SMALL, store=store, address="1.2.3.4:5", json=str(lines), view=view)
    assert addresses == ["1.2.3.4:5"]
    assert "\n[6/6] " in view.getvalue()
    assert capsys.readouterr() == ("", "")
    assert len(lab.results("small", store)) == len(lines.read_text().splitlines()) == 8
    assert not default_path().exists()
    monkeypatch.setattr(Rings, "most", 8)
    with pytest.raises(KeyboardInterrupt, match="the same call continues it"):
        lab.run(SMALL, store=store, again=True)


def test_mistakes_are_exceptions_with_the_texts_of_the_command_line(
    home: Path, addresses: list[str | None]
) -> None:
    data = yaml.safe_load(SMALL)
    for text, error, says in [
        ("nowhere.yaml", SpecError, "nowhere.yaml: no such file"),
        (SMALL.replace("heads: 2", "heads: x"), SpecError, "<spec>:6: problem.heads: got 'x'"),
        ({**data, "name": object()}, SpecError, "is no plain data"),
    ]:
        with pytest.raises(error, match=says.replace("[", r"\[")):
            lab.run(text)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected FIELD=VALUE"):
        lab.run(SMALL, changes=["problem.heads"])
    with pytest.raises(PlaceError, match="/proc/store"):
        lab.run(SMALL, store="/proc/store.db")
    assert addresses == []
    fill(default_path())
    with pytest.raises(UserError, match="did you mean 'small'"):
        lab.results("smal")


def test_results_have_a_row_for_each_measurement(home: Path) -> None:
    made = fill(default_path(), ended=1)
    with Store(default_path()) as store:
        second, third = made.runnable[1:3]
        ended = datetime(2026, 11, 25, tzinfo=UTC).timestamp()
        samples = {"ms": [1.0, 2.0], "ratio": [0.5, 0.6]}
        metrics = {"median_ms": 1.5, "hidden": 0.25}
        right = Outcome("ok", None, metrics, samples, "p", 2, ended - 1, ended)
        store.record(made.digest, second.key, right)
        store.record(made.digest, third.key, Outcome("failed", "gone", point="p", ended=ended))
    frame = lab.results("small")
    assert len(frame) == 5  # two are pruned, three have not ended
    assert frame.attrs == {"sweep": "small", "digest": made.digest, "status": "interrupted"}
    ok, failed = frame[frame["median_ms"] == 1.5].iloc[0], frame[frame.status == "failed"].iloc[0]
    assert ok["partition"] == second.config.strategy.partition
    assert ok["time"] == datetime(2026, 11, 25, tzinfo=UTC)
    assert ok["metric.hidden"] == 0.25
    assert (ok["attempts"], ok["samples.ms"], ok["samples.ratio"]) == (2, [1.0, 2.0], [0.5, 0.6])
    assert ok["predicted_ms"] == second.predicted.time_ms
    assert ok["prediction_ratio"] == pytest.approx(1.5 / second.predicted.time_ms)
    assert ok["cores"] > 0
    assert {"hardware", "torch", "triton", "ringray", "commit"} <= {*frame.columns}
    assert (failed["reason"], failed["samples.ms"] != failed["samples.ms"]) == ("gone", True)
    assert "current" not in frame


def test_history_adds_earlier_measurements(home: Path) -> None:
    made = fill(default_path(), ended=1)
    with Store(default_path()) as store:
        again = Outcome("ok", None, {"median_ms": 7.0}, {}, "p", 1, 3.0, 4.0)
        store.record(made.digest, made.runnable[0].key, again)
    assert lab.results("small")["median_ms"].dropna().tolist() == [7.0]
    frame = lab.results("small", history=True)
    both = frame.dropna(subset="median_ms")
    assert both["median_ms"].tolist() == [12.34, 7.0]
    assert both["current"].tolist() == [False, True]
    assert (frame.status == "pruned").sum() == 2
