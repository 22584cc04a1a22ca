"""Predictions and runs of points, joined."""

from __future__ import annotations

import math
import random

import pytest

from ringray.lab.search.base import Candidate, Response
from ringray.lab.search.belief import believe, hopeful


def point(name: str, predicted: float, *others: float, doubt: float = 0.1) -> Candidate:
    return Candidate(name, (("name", name),), (predicted, *others), doubt)


def runs(value: float, count: int, noise: float = 0.1) -> Response:
    """So many runs whose median is ``value``."""
    around = [value * (1 + noise * (i - (count - 1) / 2) / max(count - 1, 1)) for i in range(count)]
    return Response((value,), tuple(around))


def test_what_all_predictions_err_by_is_shared() -> None:
    """All that was measured took twice its prediction: so will the rest."""
    points = [point(name, at) for name, at in zip("abcd", (10.0, 12.0, 15.0, 20.0), strict=True)]
    known = {"a": runs(20.0, 9), "b": runs(24.0, 9), "c": runs(30.0, 9)}
    found = believe(points, known)
    assert found["d"].mean - found["a"].mean == pytest.approx(math.log(2), abs=0.01)
    assert found["a"].deviation < found["d"].deviation


def test_runs_count_more_the_more_there_are() -> None:
    """Two points of equal predictions, one of which was measured to be a fifth slower."""
    found = []
    for count in (2, 40):
        points = [point("a", 10.0), point("b", 10.0)]
        one = believe(points, {"a": runs(10.0, count, 0.5), "b": runs(12.0, count, 0.5)})
        found.append(one["b"].mean - one["a"].mean)
    assert 0 < found[0] < found[1] < math.log(1.2)


@pytest.mark.parametrize("error", [0.1, 0.6])
def test_predictions_are_trusted_as_far_as_they_prove_right(error: float) -> None:
    draw = random.Random(3)
    points = [point(str(i), 10.0 + i) for i in range(40)]
    known = {str(i): runs((10.0 + i) * draw.lognormvariate(0, error), 9, 0.05) for i in range(39)}
    assert believe(points, known)["39"].deviation == pytest.approx(error, rel=0.35)


def test_hopeful_points_are_those_that_may_be_the_best() -> None:
    points = [point("far", 30.0), point("near", 11.0), point("best", 10.0), point("failed", 9.0)]
    assert hopeful([*points, point("fast", 5.0)], {"failed": Response(None)}) == [
        "fast",
        "best",
        "near",
    ]
    known = {"far": runs(30.0, 1), "near": runs(11.0, 1), "best": runs(10.0, 1)}
    assert hopeful(points, known | {"failed": Response(None)}) == ["best", "near"]
    # One standard deviation of what was measured is less than that of what was not.
    points = [point("measured", 10.0), point("not", 10.0)]
    assert hopeful(points, {"measured": runs(10.0, 9)}) == ["not", "measured"]


def test_a_point_that_is_better_in_another_objective_stays_hopeful() -> None:
    points = [point("fast", 10.0, 5.0), point("small", 30.0, 1.0), point("worse", 30.0, 6.0)]
    known = {one.key: Response((one.predicted[0], one.predicted[1]), (1.0,) * 9) for one in points}
    assert set(hopeful(points, known)) == {"fast", "small"}
