"""The trace of one trial: the spans of every rank of the ring in one file that browsers draw.

JSON of Chrome's trace events (https://ui.perfetto.dev and chrome://tracing open it): processes are
ranks, threads are lanes (compute, wait, and one per simultaneous transfer), times are microseconds
since the barrier at which all ranks began the repeat. Clocks of hosts differ; ends of a barrier do
only by the time in which a rank notices it.

Imports neither torch nor MLflow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ringray.base import private_files
from ringray.instruments.hops import Span
from ringray.lab.trial.measurement import RankReport
from ringray.lab.trial.outcome import part_of_a_path

COMPUTE, WAIT, TRANSFER = 0, 1, 2  # lanes; further transfers have the next numbers


def path_of(sweep: str, key: str) -> Path:
    """Returns the path of a trial's trace; ``sweep`` is the sweep's digest."""
    return folder_of(sweep) / f"{part_of_a_path(key)}.json"


def folder_of(sweep: str) -> Path:
    """Returns the folder of a sweep's traces; PlaceError if ``sweep`` is not a digest."""
    return private_files.home() / "artifacts" / "traces" / part_of_a_path(sweep)[:12]


def text(reports: Sequence[RankReport]) -> str:
    """Returns the trace of all ranks, as a file."""
    lines = ",\n".join(map(json.dumps, events(reports)))
    return f"[\n{lines}\n]\n"


def keep(path: Path, text: str) -> None:
    """Writes a file beside the traces, or replaces it as a whole; OSError if that fails."""
    private_files.folder(path.parent.parent)
    private_files.folder(path.parent)
    private_files.write(path, text)


def events(reports: Sequence[RankReport]) -> list[dict[str, Any]]:
    """Returns the trace events of all ranks, those of each rank in the order of their start."""
    events: list[dict[str, Any]] = []
    for report in reports:
        spans = sorted(report.spans, key=lambda span: (span.began, span.ended))
        lanes = _lanes(spans)
        events.append(_named(report.rank, 0, "process_name", f"rank {report.rank}"))
        for lane in range(max(lanes, default=WAIT) + 1):
            name = ("compute", "wait", "transfer")[min(lane, TRANSFER)]
            name += f" {lane - TRANSFER + 1}" if lane > TRANSFER else ""
            events.append(_named(report.rank, lane, "thread_name", name))
            events.append(_named(report.rank, lane, "thread_sort_index", lane))
        events += map(partial(_complete, report.rank), lanes, spans)
    return events


def _lanes(spans: Sequence[Span]) -> list[int]:
    """Returns a lane for each span; simultaneous transfers have different ones."""
    free: list[float] = []  # by lane of transfers, when its last one ended
    lanes = []
    for span in spans:
        if span.kind != "transfer":
            lanes.append(COMPUTE if span.kind == "compute" else WAIT)
            continue
        index = next((index for index, until in enumerate(free) if until <= span.began), len(free))
        free[index:] = [span.ended, *free[index + 1 :]]
        lanes.append(TRANSFER + index)
    return lanes


def _named(rank: int, lane: int, what: str, value: str | int) -> dict[str, Any]:
    field = "sort_index" if isinstance(value, int) else "name"
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {field: value}}


def _complete(rank: int, lane: int, span: Span) -> dict[str, Any]:
    arguments: dict[str, Any] = {"hop": span.hop, "about": span.label}
    if span.kind == "transfer":
        arguments |= {"sent_bytes": span.sent, "received_bytes": span.received}
    about = {"name": f"{span.hop}: {span.label}", "cat": span.kind, "ph": "X"}
    times = {"ts": round(span.began * 1e6, 3), "dur": round(span.seconds * 1e6, 3)}
    return about | {"pid": rank, "tid": lane} | times | {"args": arguments}
