"""``ringray compare``: what names a side, outputs, exit codes and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringray.lab.cli import main
from ringray.lab.store.store import Store, default_path
from ringray.lab.trial.outcome import Outcome, record_line
from tests.support.store_rows import DIGEST, ENVIRONMENT, OTHER, sweep, trial

POINTS = 6


def _measure(
    store: Store, ms: float, digest: str = DIGEST, name: str = "quick", at: float = 1.0
) -> None:
    commit = f"{int(at):x}" * 40
    there = ENVIRONMENT | {"git": {"commit": commit[:40], "dirty": False}}
    store.begin(sweep(digest, name, there), [trial(index) for index in range(POINTS)])
    for index in range(POINTS):
        samples = [ms + index, ms + index + 0.01, ms + index - 0.01]
        store.record(
            digest, trial(index).key,
            Outcome("ok", None, {"median_ms": ms + index}, {"ms": samples}, "p" * 64, 1,
                    at + index, at + index + 0.5, there),
        )  # fmt: skip


@pytest.fixture
def lines(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A default store with `quick` at two commits and `slow`, and lines of both."""
    monkeypatch.chdir(tmp_path)
    with Store(default_path()) as store:
        _measure(store, 10.0, at=1.0)
        _measure(store, 10.0, at=10.0)
        _measure(store, 20.0, OTHER, "slow", at=11.0)
        for name in ("quick", "slow"):
            found = store.find(name)
            made = [json.dumps(record_line(found, row)) for row in store.trials(found.digest)]
            (tmp_path / f"{name}.jsonl").write_text("".join(f"{one}\n" for one in made))
        path = tmp_path / "both.jsonl"
        path.write_text(
            "".join((tmp_path / f"{one}.jsonl").read_text() for one in ("quick", "slow"))
        )
    return path


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("quick", "ab34"), ("quick@1111", "slow@bbb"), ("both.jsonl:ab12", "slow.jsonl"),
        ("home/store.db:quick", "home/store.db:ab34"),
    ],
)  # fmt: skip
def test_every_way_to_name_a_side(
    lines: Path, capsys: pytest.CaptureFixture[str], a: str, b: str
) -> None:
    assert main(["compare", a, b, "--json", "-", "--fail-above", "5%"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["verdict"], len(found["points"])) == (2, "slower", POINTS)
    assert [found[one]["name"] for one in "ab"] == ["quick", "slow"]
    assert main(["compare", a, b]) == 0, "without a limit it only tells"
    assert "answer: B is slower: median_ms +" in capsys.readouterr().out
    assert main(["compare", b, a, "--fail-above", "0%"]) == 0, "faster is no regression"
    assert "answer: B is faster" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quick", "slw"], "did you mean 'slow'?"),
        (["quick", "both.jsonl"], "several sweeps: quick (ab12ab12ab12), slow (ab34ab34ab34)"),
        (["quick", "both.jsonl:fast"], "no sweep 'fast'; it has quick, slow"),
        (["quick@2222", "slow"], "measured: 1111111111, aaaaaaaaaa"),
        (["quick", "slow", "--metric", "loss"], "none has a positive loss"),
        (["quick", "empty.jsonl"], "empty.jsonl has no sweep"),
        (["quick", "damaged.jsonl"], "damaged.jsonl:3: not a line of"),
        (["quick", "other.jsonl"], "share no point: length 64, 65, 66, 67, 68 against 4096"),
        (["quick", "slow", "--html", "slow.jsonl"], "--html slow.jsonl: exists"),
        (["quick", "slow.jsonl", "--force", "--html", "slow.jsonl"], "is an input"),
        (["quick", "slow", "--force", "--json", "home/store.db"], "is an input"),
        (["quick", "slow", "--html", "a", "--json", "./a"], "name two files"),
        *((["quick", "slow", f"--fail-above={share}"], "expected a percentage such as 5%")
          for share in ("5", "-5%", "nan%")),
    ],
)  # fmt: skip
def test_refusals(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    first, second, *_ = (tmp_path / "quick.jsonl").read_text().splitlines()
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "damaged.jsonl").write_text(f"{first}\n{second}\n{first[:99]}\n")
    (tmp_path / "other.jsonl").write_text(first.replace('"seq_len": 64', '"seq_len": 4096') + "\n")
    before = (tmp_path / "slow.jsonl").read_bytes()
    assert main(["compare", *arguments]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert "Traceback" not in err
    assert out == ""
    assert (tmp_path / "slow.jsonl").read_bytes() == before


def test_names_cannot_write_to_the_terminal(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (tmp_path / "slow.jsonl").read_text()
    hostile = text.replace('"name": "slow"', '"name": "<script>\\u001b[2J[red]"')
    hostile = hostile.replace('"torch": "2"', '"torch": "<i>\\u001b[2J"')
    (tmp_path / "h.jsonl").write_text(hostile)
    assert main(["compare", "quick", "h.jsonl", "--html", "h.html"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[red]" in out
    page = (tmp_path / "h.html").read_text()
    assert "<i>" not in page
    assert "\x1b" not in page
    assert "<script>\ufffd" not in page


def test_points_that_the_other_side_lacks_are_a_regression(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *_ = (tmp_path / "quick.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text(f"{first}\n{second}\n")
    assert main(["compare", "quick", "few.jsonl", "--fail-above", "90%"]) == 1
    out = capsys.readouterr().out
    assert "regression: 4 points of A that B lacks: 66, 67, 68, 69\n" in out
    assert "answer: 4 points in A only: 66, 67, 68, 69\n" in out
    assert main(["compare", "few.jsonl", "quick", "--fail-above", "90%"]) == 0
    assert main(["compare", "quick", "few.jsonl"]) == 0
