"""Predicted charts of packed documents: how the baselines draw, deal, compute and send, and the
record of what is predicted."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import packed_charts
from experiments.packed_charts import Batches, Floats, Ints
from ringray.lab.predict.hardware import Direction
from tests.support import records

DOCUMENTS = np.array([700, 64, 33, 7, 1])
WHOLE: Batches = {gpus: [np.array([gpus * packed_charts.TOKENS])] for gpus in packed_charts.GPUS}


@pytest.mark.parametrize("short", [0, 400])
def test_packs_are_cut_from_shuffled_documents(monkeypatch: pytest.MonkeyPatch, short: int) -> None:
    lengths = {5: short, 700: short // 6, 1024: 10, 2500: short // 40}
    monkeypatch.setattr(packed_charts, "LENGTHS", lengths)
    draw = np.random.default_rng(42)
    whole = [1024] * (10 + 2 * (short // 40))
    documents = np.array(whole + [5] * short + [700] * (short // 6) + [452] * (short // 40))
    draw.shuffle(documents)
    count, expected, cut = documents.sum() // 4096, [], 0
    remaining = documents.tolist()
    for _ in range(count):  # as exps/dist_attn/benchmark/utils.py does, a document at a time
        pack, room = ([cut] if cut else []), 4096 - cut
        cut = 0
        while room:
            length = remaining.pop(0)
            pack.append(min(length, room))
            cut, room = length - pack[-1], room - pack[-1]
        expected.append(pack)
    draw.shuffle(expected)
    drawn = packed_charts.packs(4096, count)
    assert [pack.tolist() for pack in drawn] == expected
    assert len(packed_charts.packs(4096, 2)) == 2


def test_each_document_is_dealt_in_two_blocks_a_rank() -> None:
    dealt = packed_charts.deal(np.array([16, 13, 1]), 4, 8)
    assert dealt.first.tolist() == [[2, 2, 1], [2, 2, 0], [2, 2, 0], [2, 2, 0]]
    assert dealt.second.tolist() == [[2, 0, 0], [2, 1, 0], [2, 2, 0], [2, 2, 0]]
    assert dealt.rows == 4 + 4 + 2
    assert (dealt.wide, dealt.narrow) == (8 * 128, 2 * 128)


def test_a_triangle_is_covered_by_tiles() -> None:
    rows = np.array([0, 1, 63, 64, 65, 128, 500])
    for height, width in ((64, 128), (128, 32), (128, 1024)):
        tiles = [
            sum(-(-min(size, row + height) // width) for row in range(0, size, height))
            for size in rows
        ]
        assert packed_charts.triangle(rows, height, width).tolist() == tiles


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_steps_see_each_pair_once(
    monkeypatch: pytest.MonkeyPatch, ranks: int, causal: bool
) -> None:
    def pairs(direction: Direction, diagonal: bool, _: object, queries: Ints, keys: Ints) -> Floats:
        assert not np.any((queries > 0) ^ (keys > 0))
        return (queries * (queries + 1) / 2 if diagonal else queries * keys * 1.0).sum(1)

    monkeypatch.setattr(packed_charts, "attention", pairs)
    monkeypatch.setattr(packed_charts, "SCATTERED", np.inf)
    monkeypatch.setattr(packed_charts, "BANDWIDTH", np.inf)
    dealt = packed_charts.deal(DOCUMENTS, ranks, 1)
    steps = [packed_charts.step("forward", causal, dealt, step).sum() for step in range(ranks)]
    flops = packed_charts.flops(DOCUMENTS, "forward", causal)
    assert sum(steps) * 4 * 64 * 128 == pytest.approx(flops)


def test_steps_move_what_pytorch_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: two ranks, one document of 8 rows, so blocks of 2."""
    monkeypatch.setattr(packed_charts, "attention", lambda *_: np.zeros(2))
    dealt = packed_charts.deal(np.array([8]), 2, 8)
    q, kv = 4 * dealt.wide, 4 * dealt.narrow  # elements of a rank
    monkeypatch.setattr(packed_charts, "SCATTERED", np.inf)
    monkeypatch.setattr(packed_charts, "BANDWIDTH", 1.0)

    def moved(direction: Direction, number: int) -> list[float]:
        return packed_charts.step(direction, True, dealt, number).tolist()

    assert moved("forward", 0) == [12 * q + 4 * kv] * 2
    assert moved("forward", 1) == [8 * q + 4 * kv, 12 * q + 4 * kv]
    assert moved("backward", 0) == [20 * q + 16 * kv] * 2
    assert moved("backward", 1) == [16 * q + 16 * kv, 20 * q + 10 * kv]
    monkeypatch.setattr(packed_charts, "SCATTERED", 1.0)
    monkeypatch.setattr(packed_charts, "BANDWIDTH", np.inf)
    assert moved("forward", 1) == [q / 2, q]
    assert moved("backward", 1) == [q / 2 + kv, q + kv / 2]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_call_follows_the_curve_of_the_table(direction: Direction) -> None:
    curve = next(
        curve
        for curve in packed_charts.MEASURED.attention
        if (curve.head_dim, curve.direction, curve.causal) == (128, direction, False)
    )
    for rows, rate in curve.rates.items():
        dealt = packed_charts.deal(np.array([rows]), 1, 1)
        whole = np.array([[rows]])
        (seconds,) = packed_charts.attention(direction, False, dealt, whole, whole)
        assert packed_charts.flops(whole, direction, False) / seconds == pytest.approx(
            rate, rel=0.2
        )


def test_hops_between_nodes_take_turns_with_the_steps() -> None:
    hop, outer = 20.8e9, packed_charts.MEASURED.outer
    dealt = packed_charts.deal(np.array([8192 * 4]), 4, 8)
    chunk = 2 * dealt.rows * dealt.narrow / hop
    idle, slow = np.zeros((4, 4)), np.full((4, 4), 1.0)
    hops: dict[Direction, tuple[int, int]] = {"forward": (3, 3), "backward": (4, 6)}
    for direction, (count, chunks) in hops.items():
        ended = packed_charts.ring(dealt, direction, idle, 8)
        assert ended == pytest.approx(chunks * chunk + count * outer.latency)
        assert packed_charts.ring(dealt, direction, slow, 8) == 4
    slow[1, 2] = 3  # the others wait for what rank 2 sends
    assert packed_charts.ring(dealt, "forward", slow, 8) == 6


def test_backward_begins_with_the_chunk_that_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def step(direction: Direction, causal: bool, dealt: object, number: int) -> Floats:
        numbers.append(number)
        return np.ones(8)

    monkeypatch.setattr(packed_charts, "step", step)
    for direction in packed_charts.PAIR_FLOPS:
        packed_charts.theirs("ring", DOCUMENTS, 8, direction, True)
    assert numbers == [*range(8), *reversed(range(8))]


def test_the_record_is_within_25_percent_of_all_that_was_measured() -> None:
    lines = records.rows("packed-charts.json")
    for title, charts in (
        ("packed documents", packed_charts.CAUSAL),
        ("packed documents", packed_charts.FULL),
        ("one document", packed_charts.UNPACKED),
    ):
        for (mask, direction), ways in charts.items():
            begin = lines.index(f"{title}, {mask}, {direction}") + 2
            bars = [bar for way in ways.values() for bar in way]
            for line, bar in zip(lines[begin:], bars, strict=False):
                *_, measured, predicted, _ = line.split()
                assert float(measured) == bar
                assert float(predicted) == pytest.approx(bar, rel=0.25)


def test_the_page_sums_up_the_record() -> None:
    lines = records.rows("packed-charts.json")
    (line,) = (line for line in lines if line.startswith("packed, causal: "))
    figures = line.removeprefix("packed, causal: ").partition(" (")[0]
    assert figures.replace("within", "figures are within") in records.page("docs/published.md")


def test_charts_of_one_document_are_those_of_the_record() -> None:
    lines, _ = packed_charts.report("one document", packed_charts.UNPACKED, WHOLE)
    recorded = records.rows("packed-charts.json")
    begin = recorded.index(lines[1])
    assert recorded[begin : begin + len(lines) - 1] == lines[1:]


def test_ours_is_what_the_cost_model_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_charts, "OURS", (("zigzag", "ring"),))
    pack = np.array([40_000, 20_000, 5_536])
    (line,) = packed_charts.beside({8: [pack]})[2:]
    *_, gpus, forward, backward, forward_then, backward_then = line.split()
    seconds = packed_charts.ours(("zigzag", "ring"), pack, 8, packed_charts.H100)
    assert 2 < seconds["backward"] / seconds["forward"] < 3
    rates: dict[str, float] = {
        way: packed_charts.rate([seconds[way]], [pack], 8, way, True) for way in seconds
    }
    assert gpus == "8"
    for way, printed in (("forward", forward), ("backward", backward)):
        assert float(printed) == pytest.approx(rates[way], abs=0.05)
    assert float(forward_then) < float(forward)  # FlashAttention-3 beside 7 others
    assert float(backward_then) > float(backward)


@pytest.mark.exhaustive
def test_the_record_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["packed_charts.py"])
    packed_charts.main()
    assert capsys.readouterr().out.splitlines() == records.rows("packed-charts.json")
