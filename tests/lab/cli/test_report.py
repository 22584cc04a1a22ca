"""``ringray report``: what it writes, and what it refuses; the page that reports share."""

from __future__ import annotations

import csv
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ringray.lab import cli
from ringray.lab.report import page
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import SweepInfo, TrialInfo
from tests.support import report_store
from tests.support.report_store import EVIL


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    return str(report_store.write(tmp_path / "store.db"))


def test_it_writes_page_table_and_pictures(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ["--csv", "all.csv", "--png", "pictures"]
    assert cli.main(["report", "which-ring", "--store", store, *wanted]) == 0
    assert "which-ring.html: " in capsys.readouterr().out
    text = (tmp_path / "which-ring.html").read_text()
    for said in ("What was asked", "Answer", "2,048 tokens forward: contiguous ring is the fastest",
                 "Throughput by length", "failed or took several",
                 "ringray run which-ring.yaml", "git checkout abc123"):  # fmt: skip
        assert said in text, said
    rows = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    assert len(rows) == 18
    assert {row["sweep"] for row in rows} == {"which-ring"}
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"throughput.png", "memory.png", "speedup.png", "pareto.png"}


def test_several_sweeps_are_parts_of_one_page(store: str, tmp_path: Path) -> None:
    other = "ef56" * 16
    report_store.write(tmp_path / "store.db", "which-ring", other)
    sweeps = [report_store.DIGEST[:8], other[:8], other[:10]]
    assert cli.main(["report", *sweeps, "--store", store, "--csv", "c.csv"]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "<h1>2 sweeps</h1>" in text
    assert text.count("<h3") - text.count("<h3>") == 14, "seven sections each"
    assert f"which-ring ({other[:12]})" in text
    ids = [part.split('"')[0] for part in text.split(' id="')[1:]]
    assert len(ids) == len(set(ids)), "two things of one page have one name"
    assert len((tmp_path / "c.csv").read_text().splitlines()) == 37


def test_hostile_texts_stay_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = report_store.write(tmp_path / "s.db", f"../../{EVIL}\x1b[2J")
    digest = report_store.DIGEST[:12]
    assert cli.main(["report", digest, "--store", str(store)]) == 0
    (file,) = tmp_path.glob("*.html")
    text = file.read_text()
    shown = text[: text.rindex("<script>")]
    found = [one for one in (EVIL, "<script>window", "<img", "\x1b") if one in shown]
    assert found == []
    assert "&lt;/script&gt;" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["which-rink"], "did you mean"),
        (["which-ring", "-o", "there.html"], "-o there.html: exists"),
        (["which-ring", "-o", "store.db", "--force"], "is an input"),
        (["which-ring", "-o", "same", "--csv", "./same"], "name two files"),
        (["which-ring", "-o", "page.html", "--png", "there.html"], "--png there.html"),
        (["empty"], "nothing of it has been measured yet"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    arguments: list[str], says: str, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.html").write_text("mine")
    with Store(store) as opened:
        info = SweepInfo("0" * 64, "empty", "latency", {"name": "empty"}, "", {})
        opened.begin(info, [TrialInfo("00", 0, {"seq_len": 64}, {})])
    before = sorted(path.name for path in tmp_path.iterdir())
    assert cli.main(["report", *arguments, "--store", store]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert (tmp_path / "there.html").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_force_replaces_and_a_dash_is_stdout(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.html").write_text("mine")
    (tmp_path / "pngs").mkdir()
    (tmp_path / "pngs" / "memory.png").write_text("mine")
    given = ["report", "which-ring", "--store", store, "-o", "there.html", "--png", "pngs"]
    assert cli.main([*given, "--force", "--csv", "-"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 19, "the table alone"
    assert (tmp_path / "there.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "pngs" / "memory.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "pngs" / "memory.png").write_text("mine")
    assert cli.main(["report", "which-ring", "--store", store, "--png", "pngs"]) == 2
    assert (tmp_path / "pngs" / "memory.png").read_text() == "mine"
    assert not (tmp_path / "which-ring.html").exists()


# The page


class _Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.heads: list[str] = []
        self.scopes: list[str | None] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "path", "line", "rect"):
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.heads.append(tag)
        if tag == "th":
            self.scopes.append(dict(attributes).get("scope"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def made() -> str:
    evil = "<b>&\x00</script>"
    rows = [[evil, page.Number("1.5", 1.5)], ["b", page.Number("–", None)]]
    table = page.PageTable("all", ["name", "ms"], rows, sorts=True)
    picture = page.Picture(evil, "<svg></svg>")
    inner = page.Section(evil, [table, page.Facts([("a", evil)]), picture])
    blocks = [page.Text(evil), page.Listing([evil]), page.Code(evil)]
    return page.render(evil, [page.Section("One", [*blocks, inner])], evil)


def test_its_tags_close_and_its_headings_descend() -> None:
    outline = _Outline()
    outline.feed(made())
    assert outline.open == []
    assert outline.heads == ["h1", "h2", "h3", "h4"]
    assert outline.scopes == ["col", "col", "row", "row"]


def test_texts_are_texts() -> None:
    text = made()
    body = text[text.index("<body>") :]
    assert "<b>" not in body
    assert "\x00" not in text
    assert body.count("</script>") == 1, "the page's own"


def test_nothing_is_asked_for_and_no_other_script_runs() -> None:
    text = made()
    assert not re.findall(
        r"(?:src|href)=[\"']?(?!#)\w", re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    )
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]
    assert policy.count("'sha256-") == 1
    assert "unsafe-eval" not in policy
