"""The order of points and what their samples decide of it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from ringray.lab.trial.outcome import Outcome
from ringray.lab.trial.ranking import RankedPoint, rank
from tests.support.answer_rows import timed

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
    found = rank([b, a])
    assert (found.winner, found.paired) == ("a", True)
    assert found.drift == pytest.approx(4, rel=0.05)
    assert found.behind("b") == pytest.approx(1, rel=0.05)


def test_a_drift_of_the_baseline_leaves_times_undecided() -> None:
    """Two baselines, so that ratios cannot be compared; the machine became four times slower."""
    ended = [measured(8, 10), measured(20, 40, seed=1), measured(9, 20, seed=2)]
    a, b = (point(key, one) for key, one in zip("ab", ended[:2], strict=True))
    found = rank([a, b, point("c", ended[2], baseline_threads=4)])
    assert (found.winner, found.undecided) == (None, "drift")
    said = found.why(NAMES)
    assert said.startswith("not decided: the baseline drifted by 4.")
    # Ratios that are nearly equal, of which one was measured at a quarter of the speed.
    found = rank([point("a", measured(8, 10)), point("b", measured(35, 40, seed=1))])
    assert found.why(NAMES) == "not decided: the baseline drifted by 4.0 ×, A and B are within that"


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
    a = point("a", *(measured(ms, seed=at) for at, ms in enumerate((7.0, 8.0, 9.5))))
    b = point("b", *(measured(ms, seed=9 + at) for at, ms in enumerate((8.0, 9.0, 10.5))))
    assert rank([a, b]).undecided == "noise"
    steady = [point(key, *(measured(ms, seed=at) for at in range(3))) for key, ms in
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
