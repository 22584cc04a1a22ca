"""Secrets do not leave the process, and neither does what a terminal would obey."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from ringray.base import redaction
from ringray.lab.cli import main
from ringray.lab.report import tables
from ringray.lab.specs.model import parse
from ringray.lab.store.store import Store
from ringray.lab.tracking.mlflow_record import files, note, results_csv, trial_tags
from ringray.lab.trial.outcome import Outcome, Tracked, TrialRow
from tests.support import small_spec, store_rows

SECRET = "hunter2-hunter2"
TOKEN = "feedface" * 8
CODES = "\x1b[2Jgone\x9b1m\x07\r\u202eexe"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)


@pytest.mark.parametrize(
    "text",
    [
        f"http://me:{SECRET}@host:5000/x", f"postgresql+psycopg2://me:{SECRET}@host/db",
        f"postgresql://me:p@{SECRET}/x@host/db", f"cannot reach 'http://:{SECRET}@[::1]/': refused",
        f"postgresql://host/db?user=me&password={SECRET}&sslmode=require",
        f"{{'Authorization': 'Basic {SECRET}'}}", f"MLFLOW_TRACKING_TOKEN={SECRET} mlflow ui",
        f"password = {SECRET}", f"uri: 'postgresql://me:it''s{SECRET}@host/db'",
        f"mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3D{SECRET}%3BServer%3Dh",
        f"https://b.s3.amazonaws.com/x?X-Amz-Security-Token={SECRET}&y=1",
        f"https://b.s3.amazonaws.com/x?X-Amz-Signature={SECRET}", f"https://h/c?sv=2&sig={SECRET}",
    ],
)  # fmt: skip
def test_secrets_are_known_by_where_they_stand(text: str) -> None:
    assert SECRET not in redaction.without_credentials(text)
    assert redaction.HIDDEN in redaction.without_credentials(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://host:5000/#/experiments/1", "sqlite:////home/me@work/mlflow.db",
        "zigzag-token: 12 ms", "a mail to me@host", "RAY_AUTH_MODE=token", "keys = 5",
        "the Ray at h:6379 wants a token, and RAY_AUTH_MODE is not set",
        "8 tokens, 4 heads: fine", "basic partition",
        '{"uri":"http://h:5000","user":"me@host"}', "<http://h/x>, ask me@host", "signal=9",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert redaction.hidden(text) == text
    assert not redaction.has_password(text)


def test_secrets_of_the_environment_are_known_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "0123456789")
    monkeypatch.setenv("SHORT_TOKEN", "true")
    monkeypatch.setenv("HARMLESS", "not a secret")
    said = f"sent {TOKEN}, {SECRET} and 0123456789; true, not a secret"
    assert redaction.hidden(said) == "sent ***, *** and ***; true, not a secret"


def test_nothing_that_a_terminal_obeys() -> None:
    assert redaction.plain(CODES) == "\ufffd[2Jgone\ufffd1m\ufffd\ufffd\ufffdexe"
    assert redaction.plain("two\nlines\tand ümläute ÷ ×") == "two\nlines\tand ümläute ÷ ×"


def test_a_reason_is_clean_before_it_goes_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = f"rank 0: cannot reach http://u:{SECRET}@h with {TOKEN} {CODES}"
    bad = Outcome("failed", reason, {}, {}, "p", 1, 1.0, 2.0)
    assert bad.reason is not None
    made = small_spec.fill(tmp_path / "s.db", ended=0)
    with Store(tmp_path / "s.db") as store:
        store.record(made.digest, made.runnable[0].key, bad)
        sweep, rows = store.find("small"), store.trials(made.digest)
    failed = next(row for row in rows if row.status == "failed")
    tags = trial_tags(sweep, failed, "parent")
    assert main(["status", "small", "--store", str(tmp_path / "s.db")]) == 0
    shown = [
        bad.reason,
        json.dumps(tags),
        files(sweep, rows)["results.csv"],
        capsys.readouterr().out,
    ]
    for text in shown:
        assert "cannot reach" in text
        for secret in (SECRET, TOKEN, "\x1b", "\\u001b", "\x9b"):
            assert secret not in text


def test_brackets_are_no_markup() -> None:
    """A reason may hold what rich would take for a closing tag, and end with a traceback."""
    out = io.StringIO()
    console = tables.console(out)
    row = TrialRow("k", 0, {"partition": "[/x]"}, {}, "failed", "[/tmp/x] [link=x]", {}, {}, "", 1,
                   1.0, 2.0, None)  # fmt: skip
    tables.show(tables.results_table([row], ["partition"]), console)
    assert "[/tmp/x] [link=x]" in out.getvalue()
    assert "[/x]" in out.getvalue()


def test_a_fault_of_ours_is_told_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Any) -> int:
        raise RuntimeError(f"postgresql://me:{SECRET}@db refused {TOKEN}")

    monkeypatch.setattr("ringray.lab.cli.spec.schema", broken)
    assert main(["schema"]) == 1
    said = capsys.readouterr().err
    assert "RuntimeError" in said
    assert "report it" in said
    assert SECRET not in said
    assert TOKEN not in said


def test_a_password_in_a_spec_goes_no_further_than_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"postgresql://me:{SECRET}@db.example/mlflow"
    text = small_spec.SMALL.replace("{enabled: false}", f"{{uri: '{uri}'}}")
    made = small_spec.fill(tmp_path / "s.db", text)
    with Store(tmp_path / "s.db") as store:
        sweep, rows = store.find("small"), store.trials(made.digest)
    assert SECRET in sweep.source  # it is needed to sync and to resume
    spec = tmp_path / "s.yaml"
    spec.write_text(text)
    assert main(["plan", str(spec), "--json", "-"]) == 0
    sent = [*files(sweep, rows).values()]
    for said in [*sent, capsys.readouterr().out]:
        assert SECRET not in said
    assert parse(sent[0]).digest == made.digest
    assert main(["submit", str(spec), "--address", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert "tracking.uri: has a password" in said
    assert SECRET not in said


def test_descriptions_are_no_markup_of_others() -> None:
    """MLflow renders the description as markdown, for everybody who looks at the run."""
    evil = "![x](http://evil/?c) <img src=x onerror=alert(1)> [a](javascript:1) `b` | c\n# d"
    sweep = store_rows.sweep(name=evil)
    trials = [
        TrialRow(name * 16, 0, {"partition": name, "seq_len": 64}, {}, "ok", None,
                 {"median_ms": 1.0}, {}, "", 1, 1.0, 2.0, None)
        for name in (evil, "zigzag")
    ]  # fmt: skip
    text = note(sweep, trials, Tracked("", "1", "r"), ())  # type: ignore[arg-type]
    assert "](http" not in text.replace("\\]", "")
    assert "<img" not in text
    assert "\n# d" not in text


def test_a_store_of_somebody_else_prints_no_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(tmp_path / "s.db") as store:
        store.begin(store_rows.sweep(name=f"x{CODES}"), [store_rows.trial(0)])
    assert main(["list", "--store", str(tmp_path / "s.db")]) == 0
    assert main(["status", "none", "--store", str(tmp_path / "s.db")]) == 2
    printed = capsys.readouterr()
    assert "gone" in printed.out
    assert "gone" in printed.err
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(printed.out + printed.err)


def test_cells_are_no_formulas() -> None:
    text = results_csv([{"reason": "=cmd|' /C calc'!A0", "ms": -1.5}, {"reason": "@SUM(1)"}])
    assert text.splitlines()[1:] == ["'=cmd|' /C calc'!A0,-1.5", "'@SUM(1),"]
