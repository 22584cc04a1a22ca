"""Traces of a ring in one file, and their picture."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ringray.instruments.hops import Span
from ringray.lab.report import trace_figure
from ringray.lab.store import traces
from ringray.lab.trial.measurement import RankReport

SVG = "{http://www.w3.org/2000/svg}"


def reports(ranks: int = 3) -> list[RankReport]:
    """Each rank has two transfers under way at once, then one more; spans in the order of ends."""
    return [
        RankReport(
            rank,
            spans=[
                Span("compute", "forward, step 0", "chunk 0", 0.001, 0.004),
                Span("wait", "forward, step 0", "chunk 1 from <1>", 0.004, 0.005),
                Span("transfer", "forward, step 0", "chunk 1 from <1>", 0.001, 0.005, 2 << 20, 7),
                Span("transfer", "forward, step 0", "chunk 2 from 2", 0.0015, 0.006, 0, 9),
                Span("transfer", "forward, step 1", "chunk 2 to 1", 0.005, 0.0065, 1, 0),
                Span("compute", "backward, step 0", "chunk 1", 0.0065, 0.0121 + rank / 1e3),
            ],
        )
        for rank in range(ranks)
    ]


def written(folder: Path, ranks: int = 3) -> Path:
    path = folder / "deep" / "trace.json"
    traces.keep(path, traces.text(reports(ranks)))
    return path


def spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def test_one_file_holds_all_ranks(tmp_path: Path) -> None:
    path = written(tmp_path)
    events = json.loads(path.read_text())
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes = ("compute", "wait", "transfer", "transfer 2")
    assert names == {(rank, lane): lanes[lane] for rank in range(3) for lane in range(4)}
    times: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans(events):
        lane = times.setdefault((event["pid"], event["tid"]), [])
        lane.append((event["ts"], event["ts"] + event["dur"]))
    assert len(times) == 3 * 4
    for lane in times.values():  # spans of one lane follow each other
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(lane))
    first = spans(events)[0]
    assert (first["ts"], first["dur"], first["cat"]) == (1000.0, 3000.0, "compute")
    assert first["name"] == "forward, step 0: chunk 0"
    sent = [event["args"]["sent_bytes"] for event in spans(events) if event["cat"] == "transfer"]
    assert sum(sent) == 3 * ((2 << 20) + 1)
    traces.keep(path, traces.text(reports(1)))  # replaced as a whole
    assert {event["pid"] for event in json.loads(path.read_text())} == {0}


def test_a_picture_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    caption = "4 ranks & <one> $caption$ " * 20
    assert trace_figure.main([str(written(tmp_path)), str(out), "--caption", caption]) == 0
    root = ElementTree.fromstring(out.read_text())
    assert root.tag == f"{SVG}svg"
    assert 700 < float(root.get("width", 0)) < 900
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert root.get("aria-label") == "Computation, transfers and waits of 3 ranks in 14 ms"
    assert "var(--" not in out.read_text(), "it stands alone"
    assert "#0072b2" in out.read_text(), "in the colours for white paper"
    assert len(titles) == 3 * 6
    assert titles[0] == "compute: forward, step 0: chunk 0, 3.00 ms"
    assert "transfer: forward, step 0: chunk 1 from <1>, 2.00 MiB, 4.00 ms" in titles
    texts = [" ".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {"rank 0", "rank 1", "rank 2", "ms", "wait", "chunk 1"} <= set(texts)
    assert caption.strip() in " ".join(texts)


EVENT = {"ph": "X", "pid": 0, "tid": 0, "cat": "compute", "name": "a: b", "ts": 0, "dur": 5,
         "args": {}}  # fmt: skip


def test_what_a_trace_says_is_text_in_the_picture(tmp_path: Path) -> None:
    path, out = tmp_path / "t.json", tmp_path / "out.svg"
    evil = "</title><script>alert(1)</script>\x1b[2J"
    path.write_text(json.dumps([EVENT | {"name": evil}]))
    assert trace_figure.main([str(path), str(out), "--caption", "<script>'\"</svg>"]) == 0
    root = ElementTree.fromstring(out.read_text())
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert "alert(1)" in out.read_text()


@pytest.mark.parametrize(
    "text",
    ["", "{}", '[{"ph": "X"}]', "[" * 100_000]
    + [json.dumps([EVENT | change]) for change in ({"cat": "other"}, {"ts": -1}, {"dur": "'/>"})],
)
def test_what_is_no_trace_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no.json"
    path.write_text(text)
    assert trace_figure.main([str(path), str(tmp_path / "out.svg")]) == 2
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "out.svg").exists()
