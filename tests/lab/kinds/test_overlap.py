"""Kind overlap: timelines that cover the script, tapes that send the same, and what is recorded."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from ringray.comm.ring import METER
from ringray.instruments.hops import Hop, Span, hidden, hops, total
from ringray.lab.kinds import overlap
from ringray.lab.kinds.base import RankContext
from ringray.lab.plan import plan
from ringray.lab.plan.trial import Trial
from ringray.lab.specs import model as spec
from ringray.lab.store.traces import path_of
from ringray.lab.trial import measurement
from tests.support import place as drive
from tests.support import ranks, tracking_store
from tests.support.place import Place

WALKED = (
    ("ring", "planned"),
    ("ring", "query-side"),
    ("bidirectional", "planned"),
    ("direct", "planned"),
    ("double-ring:2", "planned"),
    ("staged", "planned"),
)
OTHERS = (("allgather:1", "planned"), ("ulysses", "planned"), ("hybrid:2", "query-side"))
REPEATS = 2
RING = 4


def measured(name: str, backward: str) -> tuple[Trial, measurement.RankReport]:
    """Returns a small point of overlap on a ring of 4, with shards that are cut unevenly by the
    mask, and this rank's report of it."""
    text = (
        f"version: 1\nname: o\nkind: overlap\nring: {{size: {RING}, device: cpu}}\n"
        "problem: {seq_len: 90, heads: 4, head_dim: 16, dtype: float32, window: 70}\n"
        f"strategy: {{transport: '{name}', backward: {backward}}}\n"
        f"measure: {{warmup: 1, repeats: {REPEATS}, baseline: null}}\n"
    )
    (point,) = plan.build(spec.parse(text)).trials
    assert point.pruned is None, point.pruned
    context = RankContext(dist.get_rank(), torch.device("cpu"), dist.group.WORLD)
    return point, overlap.run(point.config, context)


# On real ranks


def spans_and_tapes_carry_what_was_sent(rank: int, size: int) -> None:
    for name, backward in (*WALKED, *OTHERS):
        before = METER.snapshot()
        point, report = measured(name, backward)
        used = METER.since(before)
        by_span = [sum(s.sent for s in report.spans), sum(s.received for s in report.spans)]
        assert (
            by_span[0] == report.values["sent_bytes"][0] == sum(hop.sent for hop in report.hops)
        ), name
        # Each repeat is a pass and its tape.
        runs = point.config.measure.warmup + 2 * point.config.measure.repeats
        assert used.messages == report.messages * runs, name
        assert used.sent_bytes == report.values["sent_bytes"][0] * runs, name
        # Each hop that transfers was timed alone too, and nothing else was.
        transfers = {s.hop for s in report.spans if s.kind == "transfer"}
        assert {hop.name for hop in report.hops if hop.transfer > 0} == transfers, name
        assert METER.timeline is METER.tape is None
        everywhere = torch.tensor(by_span)
        dist.all_reduce(everywhere)
        assert everywhere.tolist() == [point.predicted.sent_bytes] * 2, name


def a_report_is_complete(rank: int, size: int) -> None:
    _, report = measured("ring", "planned")
    values = [report.values[name] for name in ("compute_ms", "transfer_ms", "wait_ms")]
    for times in (report.seconds, *values):
        assert len(times) == REPEATS
        assert all(time > 0 for time in times)
    assert any(  # the spans are those of one repeat
        (total(report.spans, "compute") * 1e3, total(report.spans, "wait") * 1e3) == (compute, wait)
        for compute, _, wait in zip(*values, strict=True)
    )
    assert all(0 <= s.began <= s.ended <= max(report.seconds) for s in report.spans)


def test_on_a_ring_of_four() -> None:
    ranks.on_ring(RING, [spans_and_tapes_carry_what_was_sent, a_report_is_complete])


# From spans to numbers


def test_hops_are_medians_over_repeats() -> None:
    def repeat(slower: float) -> list[Span]:
        return [
            Span("compute", "forward, step 0", "chunk 0", 1.0, 3.0 * slower),
            Span("compute", "forward, step 0", "chunk 1", 9.0, 10.0),
            Span("wait", "forward, step 0", "chunk 1 from 1", 3.0, 3.0 + slower),
            Span("transfer", "forward, step 0", "chunk 1 from 1", 0.5, 4.0, 7, 5),
            Span("compute", "forward, step 1", "chunk 1", 10.0, 12.0),
        ]

    alone = [[Span("transfer", "forward, step 0", "", 0.0, time)] for time in (3.0, 1.0, 2.0)]
    assert hops([repeat(4), repeat(1), repeat(2)], alone) == [
        Hop("forward, step 0", 0.5, 6.0, 2.0, 2.0, 7),
        Hop("forward, step 1", 10.0, 2.0, 0.0, 0.0, 0),
    ]


@pytest.mark.parametrize(
    ("waits", "share"),
    [
        ((0.0, 0.0), 1.0),
        ((3.0, 1.0), 0.0),
        ((9.0, 1.0), 0.0),  # what is beyond the transfer's own time is for a late rank,
        ((9.0, 0.0), 0.25),  # and takes nothing from what another hop hides
        ((1.5, 0.5), 0.5),
    ],
)
def test_hidden(waits: tuple[float, float], share: float) -> None:
    transfers = (3.0, 1.0)
    one, two = (
        Hop("", 0.0, 1.0, transfer, wait, 1)
        for transfer, wait in zip(transfers, waits, strict=True)
    )
    for of_ranks in ([[one, two]], [[one], [two]]):
        assert hidden(of_ranks) == pytest.approx(share)
    assert hidden([[Hop("", 0.0, 1.0, 0.0, 0.0, 0)], []]) is None


# From the command line to the store, the disk and MLflow


SPEC = (
    drive.tiny("over", repeats=3)
    .replace("kind: latency", "kind: overlap")
    .replace("direction: forward", "direction: forward+backward")
    + "strategy: {transport: ring, backward: [planned, query-side]}\n"
)


@pytest.mark.slow
def test_a_sweep_records_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first = place.run("run", place.spec(SPEC))
    assert first.code == 0, first.err
    rows = place.trials("over")
    assert [row.status for row in rows] == ["ok"] * 2
    (sweep,) = place.sweeps()
    monkeypatch.setenv("RINGRAY_HOME", str(place.home))
    for row in rows:
        metrics = row.metrics
        assert 0 <= metrics["hidden"] <= 1
        parts = {"compute_ms", "transfer_ms", "wait_ms"}
        assert {name for name in parts if metrics[name] > 0} == parts
        assert metrics["sent_bytes"] == row.predicted["sent_bytes"], row.config["backward"]
        by_hop = {n: v for n, v in row.samples.items() if n.startswith(measurement.HOP)}
        assert {len(values) for values in by_hop.values()} == {len(measurement.HOP_VALUES)}
        assert sum(values[-1] for values in by_hop.values()) == metrics["sent_bytes"]
        by_rank = [row.samples[f"{measurement.RANK}{rank}"] for rank in range(2)]
        assert sum(values[-1] for values in by_rank) == metrics["sent_bytes"]
        for part in range(3):
            highest = sum(values[part] for values in by_hop.values())
            assert max(one[part] for one in by_rank) <= highest <= sum(one[part] for one in by_rank)
        events = json.loads(path_of(sweep.digest, row.key).read_text())
        assert {event["pid"] for event in events} == {0, 1}
        sent = [event["args"].get("sent_bytes", 0) for event in events]
        assert sum(sent) == metrics["sent_bytes"]
    # The summary names the traces, which MLflow holds too.
    assert "of its transfers hidden" in first.out
    paths = {path_of(sweep.digest, row.key): row.key for row in rows}
    folder = place.home / "artifacts"
    assert {path for path in (folder / "traces").rglob("*") if path.is_file()} == {*paths}
    uri = f"sqlite:///{place.home / 'mlflow.db'}"
    _, children = place.mlflow("over")
    assert set(children) == set(paths.values())
    for path, key in paths.items():
        assert path.name in first.out
        run = children[key]
        assert "hidden" in run.data.metrics
        files = tracking_store.client(uri).list_artifacts(run.info.run_id)
        assert [file.path for file in files] == ["trace.json"]
        local = folder / run.info.run_id / "artifacts" / "trace.json"
        assert local.read_text() == path.read_text()
