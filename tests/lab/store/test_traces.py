"""Traces of a ring in one file."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ringray.instruments.hops import Span
from ringray.lab.store import traces
from ringray.lab.trial.measurement import RankReport

if TYPE_CHECKING:
    from pathlib import Path


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
