"""Figures of a sweep: the right numbers under the right names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ringray.lab.report.figures import blocks, data, lines, memory, pareto, speedup, throughput
from tests.support.figure_rows import cuts, grid, row, strategies, tiles, timed


def test_points_are_medians_over_replicas_that_are_ok() -> None:
    rows = [row(i, timed(ms), replica=i) for i, ms in enumerate((5.0, 9.0, 6.0))]
    rows.append(row(3, {}, "failed", replica=3))
    (point,) = data.points(rows)
    assert point.metrics["median_ms"] == 6.0
    assert point.config["replica"] == 0


def test_panels_are_problems() -> None:
    panels, left_out = data.panels(data.points(strategies()), beside=("seq_len",))
    assert [panel.title for panel in panels] == ["forward", "forward+backward"]
    assert [len(panel.points) for panel in panels] == [8, 8]
    assert left_out == 0
    many = [row(i, timed(5.0), heads=h, head_dim=d) for i, (h, d) in enumerate(
        (h, d) for h in (1, 2, 4) for d in (16, 32, 64))]  # fmt: skip
    panels, left_out = data.panels(data.points(many))
    assert (len(panels), left_out) == (6, 3)
    assert panels[0].title == "heads1 dim16"
    lengths, _ = data.panels(data.points(strategies()))
    assert lengths[0].title == "2,048 tokens forward"


def test_lines_have_a_point_per_length_and_the_best_comes_first() -> None:
    rows = [
        row(i, timed(ms, mib), seq_len=length, partition=partition)
        for i, (length, partition, ms, mib) in enumerate(
            [(8192, "zigzag", 20.0, 80.0), (2048, "zigzag", 5.0, 20.0),
             (2048, "striped", 4.0, 30.0), (8192, "striped", 40.0, 70.0)]
        )
    ]  # fmt: skip
    (panel,), _ = lines.varying_lengths(data.points(rows), "tflops")
    found = lines.lines(panel, ["partition"], "tflops")
    assert found == [
        lines.Line("zigzag", [2048, 8192], [0.4, 0.1]),
        lines.Line("striped", [2048, 8192], [0.5, 0.05]),
    ]
    least = lines.lines(panel, ["partition"], "median_ms")
    assert [line.name for line in least] == ["zigzag", "striped"]
    # The baseline did the same work in 100 ms, beside each of them.
    beside = throughput.baseline(panel)
    assert beside is not None
    assert beside.name == "SDPA with 2 threads"
    assert beside.xs == [2048, 8192]
    assert beside.ys == pytest.approx([0.02, 0.02])


def test_throughput_and_memory_have_their_units() -> None:
    shown = data.points(strategies())
    small = throughput.draw(shown)
    assert small is not None
    assert {axes.get_ylabel() for axes in small.axes} == {"GFLOP/s, all ranks"}
    assert small.axes[0].get_xlabel() == "sequence length (tokens)"
    assert [tick.get_text() for tick in small.axes[0].get_xticklabels()] == ["2k", "8k"]
    large = [row(i, timed(0.01, 9000.0), seq_len=1024 << i) for i in range(3)]
    fast, wide = throughput.draw(data.points(large)), memory.draw(data.points(large))
    assert fast is not None
    assert wide is not None
    assert fast.axes[0].get_ylabel() == "TFLOP/s, all ranks"
    assert wide.axes[0].get_ylabel() == "peak memory per rank (GiB)"
    assert wide.axes[0].lines[0].get_ydata()[0] == pytest.approx(9000 / 1024)


def test_speed_up_is_one_over_the_ratio() -> None:
    rows = [
        row(i, timed(ms), partition=partition, transport=transport)
        for i, (partition, transport, ms) in enumerate(
            [("zigzag", "ring", 80.0), ("striped", "ring", 125.0), ("zigzag", "ulysses", 50.0)]
        )
    ]  # fmt: skip
    points = data.points(rows)
    (panel,), _ = data.panels(points, beside=("seq_len",))
    found = speedup.bars(panel, data.strategies(points))
    assert found.names == ["zigzag ulysses", "zigzag ring", "striped ring"]
    assert [found.values[name, 1024] for name in found.names] == pytest.approx([2.0, 1.25, 0.8])
    drawn = speedup.draw(points)
    assert drawn is not None
    assert drawn.get_suptitle() == "Speed-up over SDPA with 2 threads"
    assert [bar.get_width() for bar in drawn.axes[0].patches] == pytest.approx([2.0, 1.25, 0.8])
    alone = [row(i, timed(5.0 + i, baseline=None), partition=p) for i, p in enumerate("ab")]
    assert speedup.draw(data.points(alone)) is None


def test_the_front_is_what_nothing_beats() -> None:
    places = [(10, 50), (20, 30), (20, 40), (30, 30), (40, 10), (50, 11), (10, 60)]
    rows = [row(i, timed(ms, mib), transport=f"t{i}") for i, (ms, mib) in enumerate(places)]
    drawn = pareto.draw(data.points(rows))
    assert drawn is not None
    assert {text.get_text() for text in drawn.axes[0].texts} == {"t0", "t1", "t4"}
    same = [row(i, timed(5.0 + i), partition=p) for i, p in enumerate("ab")]
    assert pareto.draw(data.points(same)) is None, "memory does not vary"


def test_tiles_are_query_rows_by_key_rows_of_each_kernel() -> None:
    found, left_out = blocks.maps(data.points(tiles()))
    assert [one.title for one in found] == ["forward", "dkv"]
    assert left_out == 0
    forward = found[0]
    assert (forward.x, forward.y, forward.default_ms) == ("key rows", "query rows", 6.0)
    assert set(forward.cells) == {(n, m) for n in (32, 64, 128) for m in (64, 128)}
    # Trials 0 and 1 are 64x32 with 4 and 8 warps, of 5 and 10 ms.
    assert forward.cells[32, 64] == blocks.Cell(5.0, "4/2")


def test_what_aten_cuts_is_shown_by_threads() -> None:
    (found,), _ = blocks.maps(data.points(cuts()))
    assert (found.x, found.y) == ("query rows per call", "threads per rank")
    assert set(found.cells) == {(b, t) for b in (64, 256, 1024) for t in (1, 2)}
    assert found.cells[64, 2].ms == 8.0
    drawn = blocks.draw(data.points(cuts()))
    assert drawn is not None
    image = drawn.axes[0].images[0].get_array()
    assert image.shape == (2, 3)
    assert image.min() == 1.0
    slow = grid(blocks=[64, 128], seq_len=[1024, 2048])
    maps, _ = blocks.maps(data.points([row(i, timed(5.0), **p) for i, p in enumerate(slow)]))
    assert [one.title for one in maps] == ["1,024 tokens", "2,048 tokens"]


def test_neither_a_plan_nor_the_figures_import_matplotlib() -> None:
    code = (
        "import sys, ringray, ringray.lab.plan.plan, ringray.lab.report.figures\n"
        "import ringray.lab.tracking.description\n"
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
