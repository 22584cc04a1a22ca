"""The order of points and what their samples decide of it; and how often such answers are wrong: of
simulated sweeps on drifting machines, and of A against A.

``python -m tests.lab.report.test_answers`` prints the rates of docs/compare.md.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from ringray.lab.report import comparison_views as views
from ringray.lab.report import verdict
from ringray.lab.report.comparison import ComparedSide, Comparison, compare
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome
from ringray.lab.trial.ranking import RankedPoint, rank
from tests.support.answer_rows import DRIFTS, SHAPES, drifting, side, stored, timed
from tests.support.exhaustive import exhaustive


def answers(folder: Path, drift: str, gap: float, count: int) -> tuple[int, int]:
    """Returns how many sweeps name a fastest point, and how many of these another than it is."""
    named = wrong = 0
    with Store(folder / "store.db") as store:
        for seed in range(count):
            rows = stored(store, f"{seed:064x}", drifting(seed, gap, drift))
            (said,) = verdict.lines(rows)
            is_named = " is the fastest" in said
            assert is_named == (not said.startswith("not decided: ")) == bool(verdict.winners(rows))
            named += is_named
            wrong += is_named and not (gap and said.startswith("contiguous is"))
    return named, wrong


@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize("count", [15, *exhaustive(200)])
def test_the_fastest_is_right_or_not_decided_on_a_drifting_machine(
    tmp_path: Path, drift: str, count: int
) -> None:
    for gap, least in ((0.0, 0.0), (0.03, 0.0), (0.4, 0.75)):
        folder = tmp_path / f"{gap}"
        folder.mkdir()
        named, wrong = answers(folder, drift, gap, count)
        assert wrong <= 0.05 * count, f"gap {gap}: {wrong} of {count} wrong"
        assert named >= least * count, f"gap {gap}: {named} of {count} decided"


def compared(
    shape: str, seed: int, replicas: int, slower: tuple[int, ...] = (), factor: float = 1.1
) -> Comparison:
    metric = "ratio" if shape == "noisy baseline" else "median_ms"
    a, b = (
        ComparedSide(name, name, name * 64, {}, rows)
        for name, rows in (
            ("a", side(shape, 2 * seed, 0.0, replicas=replicas)),
            ("b", side(shape, 2 * seed + 1, 1000.0, 12, replicas, slower, factor)),
        )
    )
    return compare(a, b, metric)


def alarm(found: Comparison) -> bool:
    """Tells whether anything seems to have changed, the whole or any point."""
    said = views.answer(found)[0].startswith(("B is slower", "B is faster", "B is worse", "B is b"))
    return said or not {one.verdict for one in found.points} <= {"equal", "not decided"}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", [(12, 2), *exhaustive(*((400, one) for one in (1, 2, 3, 5)))])
def test_a_against_a_is_seldom_a_change(shape: str, case: tuple[int, int]) -> None:
    count, replicas = case
    alarms = sum(alarm(compared(shape, seed, replicas)) for seed in range(count))
    assert alarms <= max(1, 0.025 * count), f"{alarms} of {count}"


@pytest.mark.parametrize(("count", "replicas"), [(20, 2), (20, 3)])
def test_ten_percent_at_a_noise_of_one_are_found(count: int, replicas: int) -> None:
    one = every = 0
    for seed in range(count):
        found = compared("1%", seed, replicas, slower=(3,))
        one += [at for at, point in enumerate(found.points) if point.verdict == "slower"] == [3]
        found = compared("1%", seed, replicas, slower=tuple(range(12)))
        every += found.verdict == "slower" and found.regressed(0.05)
    assert min(one, every) >= 0.95 * count, (one, every)


# What samples decide

NAMES = {"a": "A", "b": "B", "c": "C"}


def point(key: str, *replicas: Outcome, **config: Any) -> RankedPoint:
    return RankedPoint(key, {"baseline": "sdpa", "baseline_threads": 2, **config}, replicas)


def measured(ms: float, base: float = 10.0, seed: int = 0, repeats: int = 5) -> Outcome:
    draw = random.Random(seed)
    times, beside = (
        [middle * math.exp(draw.gauss(0, 0.01)) for _ in range(repeats)] for middle in (ms, base)
    )
    return timed(times, beside)


def test_the_ratio_decides_where_the_baseline_is_the_same() -> None:
    a, b = point("a", measured(16, 40)), point("b", measured(8, 10, seed=1))
    ranking = rank([b, a])
    assert (ranking.winner, ranking.paired) == ("a", True)
    assert ranking.drift == pytest.approx(4, rel=0.05)
    assert ranking.behind("b") == pytest.approx(1, rel=0.05)


def test_a_drift_of_the_baseline_leaves_times_undecided() -> None:
    """Two baselines, so that ratios cannot be compared; the machine became four times slower."""
    ended = [measured(8, 10), measured(20, 40, seed=1), measured(9, 20, seed=2)]
    a, b = (point(key, outcome) for key, outcome in zip("ab", ended[:2], strict=True))
    ranking = rank([a, b, point("c", ended[2], baseline_threads=4)])
    assert (ranking.winner, ranking.undecided) == (None, "drift")
    reason = ranking.why(NAMES)
    assert reason.startswith("not decided: the baseline drifted by 4.")
    # Ratios that are nearly equal, of which one was measured at a quarter of the speed.
    ranking = rank([point("a", measured(8, 10)), point("b", measured(35, 40, seed=1))])
    assert (
        ranking.why(NAMES) == "not decided: the baseline drifted by 4.0 ×, A and B are within that"
    )


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((8.0, 8.1), "not decided: A and B are within their noise"),
        ((8.0, 8.1, 8.1), "not decided: A and 2 others are within their noise"),
        ((8.0, 8.1, 12.0), "not decided: A and B are within their noise"),
        ((8.0, 10.0, 12.0), ""),
    ],
)
def test_why_nothing_is_decided(times: tuple[float, ...], said: str) -> None:
    points = [point(key, measured(ms)) for key, ms in zip("abc", times, strict=False)]
    assert rank(points).why(NAMES) == said
    assert (rank(points).winner is None) == bool(said)


def test_few_runs_decide_nothing_and_one_point_does_not_win() -> None:
    few = [point(key, measured(ms, repeats=2)) for key, ms in (("a", 8.0), ("b", 80.0))]
    assert rank(few).why(NAMES) == "not decided: too few runs to tell A and B apart"
    assert rank(few[:1]).winner is None
    assert rank([]).keys == ()
    lucky = [point("a", measured(5, repeats=1)), point("b", measured(8))]
    assert rank(lucky).keys == ("b",)


def test_replicas_that_differ_leave_their_medians_undecided() -> None:
    a = point("a", *(measured(ms, seed=seed) for seed, ms in enumerate((7.0, 8.0, 9.5))))
    b = point("b", *(measured(ms, seed=9 + seed) for seed, ms in enumerate((8.0, 9.0, 10.5))))
    assert rank([a, b]).undecided == "noise"
    steady = [point(key, *(measured(ms, seed=seed) for seed in range(3))) for key, ms in
              (("a", 8.0), ("b", 9.0))]  # fmt: skip
    assert rank(steady).winner == "a"


def test_of_metrics_without_noise_the_value_decides() -> None:
    light, heavy = (Outcome("ok", None, {"peak_memory_bytes": x}, {"ms": [1.0]}) for x in (9, 10.0))
    assert rank([point("b", heavy), point("a", light)], "peak_memory_bytes").winner == "a"
    assert rank([point("b", light), point("a", light)], "peak_memory_bytes").winner is None
    fast, slow = (Outcome("ok", None, {"tflops": x}, {"ms": [1.0, 1.01, 0.99]}) for x in (4.0, 2.0))
    assert rank([point("b", slow), point("a", fast)], "tflops").winner == "a"
    broken = Outcome("ok", None, {"median_ms": math.nan}, {"ms": [math.nan]})
    assert rank([point("a", broken)]).keys == ()


def main() -> None:
    for replicas in (1, 2, 3, 5):
        alarms = [sum(alarm(compared(shape, n, replicas)) for n in range(400)) for shape in SHAPES]
        print(f"A against A, {replicas} replicas: alarms {max(alarms) / 400:.1%} at most")
    for shape, factor in (("1%", 1.05), ("half 12%", 1.1)):
        for replicas in (2, 3, 5):
            everywhere = [compared(shape, n, replicas, tuple(range(12)), factor) for n in range(60)]
            rate = sum(found.verdict == "slower" for found in everywhere) / 60
            print(f"{shape}, {factor} times as long, {replicas} replicas: slower in {rate:.0%}")


if __name__ == "__main__":
    main()
