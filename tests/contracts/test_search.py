"""Contract of every method of search, on made-up landscapes whose best point is known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ringray.lab.search import METHODS
from ringray.lab.search.base import (
    LEAST,
    Candidate,
    Request,
    Response,
    Search,
    SearchSettings,
    layers,
)
from tests.support.exhaustive import exhaustive

REPEATS, WARMUP = 18, 1
SEARCHING = [name for name, method in METHODS.items() if "budget" in method.options]

LANDSCAPES: dict[str, Callable[[int, int, int], float]] = {
    "bowl": lambda x, y, z: 10 + (x - 3) ** 2 + (y - 2) ** 2 + 2 * z,
    "plateau": lambda x, y, z: 10 if (x, y, z) == (4, 1, 2) else 20 + x,
    "ridge": lambda x, y, z: 10 + abs(x - y) + 0.5 * z,
    "crossed": lambda x, y, z: 10 + (x ^ y) * 3 + abs(z - 1),
}
AXES = (range(6), range(4), range(3))


def candidates(
    cost: Callable[[int, int, int], float], knows: float = 0.3, objectives: int = 1
) -> list[Candidate]:
    """Points whose predictions are off by up to a factor of 1 + ``knows``."""
    draw = random.Random(7)
    found = []
    for point in itertools.product(*AXES):
        predicted = cost(*point) * (1 + knows * draw.random())
        scores = (predicted, float(point[2]))[:objectives]
        found.append(Candidate(str(point), tuple(zip("xyz", point, strict=True)), scores))
    return found


class Machine:
    """Answers a search, and counts what it costs. ``noise``: relative spread of one run."""

    def __init__(
        self,
        cost: Callable[[int, int, int], float],
        *,
        noise: float = 0.02,
        seed: int = 0,
        objectives: int = 1,
        broken: Callable[[int], bool] = lambda x: False,
    ) -> None:
        self.cost, self.noise, self.objectives, self.broken = cost, noise, objectives, broken
        self.draw = random.Random(seed)
        self.samples: dict[str, list[float]] = {}
        self.runs = 0
        self.log: list[list[Request]] = []

    def point(self, key: str) -> tuple[int, int, int]:
        x, y, z = map(int, key.strip("()").split(","))
        return x, y, z

    def answer(self, ask: Request) -> Response:
        x, y, z = self.point(ask.key)
        had = self.samples.setdefault(ask.key, [])
        if ask.repeats > len(had):
            self.runs += WARMUP + ask.repeats - len(had)
        if self.broken(x):
            return Response(None)
        while len(had) < ask.repeats:
            had.append(self.cost(x, y, z) * (1 + self.draw.gauss(0, self.noise)))
        middle = sorted(had)[len(had) // 2]
        return Response((middle, float(z))[: self.objectives], tuple(had))

    def play(self, search: Search) -> None:
        asks = next(search, None)
        while asks is not None:
            assert asks, "an empty round ends a study"
            self.log.append(asks)
            try:
                asks = search.send({ask.key: self.answer(ask) for ask in asks})
            except StopIteration:
                return

    def best(self) -> str:
        """The best of what was measured often."""
        most = max(len(samples) for samples in self.samples.values())
        full = {k: sorted(s)[len(s) // 2] for k, s in self.samples.items() if 2 * len(s) >= most}
        return min(full, key=lambda key: full[key])


def play(name: str, points: Sequence[Candidate], machine: Machine, **settings: float) -> Machine:
    given = {"repeats": REPEATS, "warmup": WARMUP, "budget": 0.25, "seed": 0, **settings}
    machine.play(
        METHODS[name].search(points, SearchSettings(objectives=machine.objectives, **given))
    )  # type: ignore[arg-type]
    return machine


@pytest.mark.parametrize("name", METHODS)
def test_it_asks_for_points_that_exist_and_never_for_less_than_they_have(name: str) -> None:
    points = candidates(LANDSCAPES["bowl"])
    machine = play(name, points, Machine(LANDSCAPES["bowl"]))
    had: dict[str, int] = {}
    for asks in machine.log:
        assert len({ask.key for ask in asks}) == len(asks)
        for ask in asks:
            assert had.get(ask.key, 0) < ask.repeats <= REPEATS
            had[ask.key] = ask.repeats
    assert set(had) <= {point.key for point in points}
    assert max(had.values()) == REPEATS  # the best has been measured in full


@pytest.mark.parametrize("name", [name for name, one in METHODS.items() if one.exhaustive])
def test_an_exhaustive_method_measures_every_point_in_full(name: str) -> None:
    points = candidates(LANDSCAPES["bowl"])
    machine = play(name, points, Machine(LANDSCAPES["bowl"]))
    assert set(machine.samples) == {point.key for point in points}
    assert {len(samples) for samples in machine.samples.values()} == {REPEATS}


@pytest.mark.parametrize("name", SEARCHING)
@pytest.mark.parametrize("budget", [1e-6, 0.1, 0.6])
def test_it_keeps_to_its_budget(name: str, budget: float) -> None:
    points = candidates(LANDSCAPES["ridge"])
    machine = play(name, points, Machine(LANDSCAPES["ridge"]), budget=budget)
    share = math.ceil(budget * len(points) * (WARMUP + REPEATS))
    assert machine.runs <= max(share, LEAST * (WARMUP + REPEATS))


@pytest.mark.parametrize("name", SEARCHING)
@pytest.mark.parametrize("doubt", [0.3, 0.01])
@pytest.mark.parametrize("count", [1, 2, 7, 13])
def test_a_small_space_is_searched_too(name: str, count: int, doubt: float) -> None:
    """However sure the predictions are."""
    cost = LANDSCAPES["bowl"]
    points = [replace(one, doubt=doubt) for one in candidates(cost)]
    points = points[:: len(points) // count][:count]
    machine = play(name, points, Machine(cost), budget=0.25)
    assert len(machine.samples) >= min(LEAST, count)


@pytest.mark.parametrize("name", ["halving", "optuna"])
@pytest.mark.parametrize("landscape", ["ridge", "crossed", *exhaustive("bowl", "plateau")])
def test_it_finds_what_measuring_everything_finds(name: str, landscape: str) -> None:
    cost = LANDSCAPES[landscape]
    points = candidates(cost)
    least = min(cost(*point) for point in itertools.product(*AXES))
    losses = []
    for seed in range(3):
        machine = play(name, points, Machine(cost, seed=seed), seed=seed)
        losses.append(cost(*machine.point(machine.best())) / least - 1)
    assert sorted(losses)[1] <= 0.03
    assert max(losses) <= 0.1


@pytest.mark.parametrize("name", METHODS)
def test_points_that_fail_do_not_end_it(name: str) -> None:
    cost = LANDSCAPES["bowl"]
    machine = play(name, candidates(cost), Machine(cost, broken=lambda x: x in (3, 4)), budget=0.5)
    assert machine.point(machine.best())[0] not in (3, 4)
    play(name, candidates(cost), Machine(cost, broken=lambda x: True))


@pytest.mark.parametrize("name", METHODS)
def test_the_same_answers_lead_to_the_same_questions(name: str) -> None:
    cost = LANDSCAPES["crossed"]
    logs = [play(name, candidates(cost), Machine(cost)).log for _ in range(2)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("name", ["halving", "optuna"])
def test_of_several_objectives_it_measures_more_than_one_compromise(name: str) -> None:
    """x alone decides the time, z the memory, and they pull apart."""

    def cost(x: int, y: int, z: int) -> float:
        return 10 + 4 * abs(x - 2) + 3 * (2 - z) + 5 * y

    machine = play(name, candidates(cost, objectives=2), Machine(cost, objectives=2), budget=0.35)
    points = [machine.point(key) for key in machine.samples]
    front = next(layers(points, lambda point: (cost(*point), float(point[2]))))
    assert len({point[2] for point in front}) >= 2
    best = min(cost(*point) for point in points)
    assert best <= 1.1 * cost(2, 0, 2)


@pytest.mark.parametrize("works", [0, 1, 9, 57, 71, 72])
def test_bisection_finds_the_largest_that_works(works: int) -> None:
    """It begins with the largest, so what is near it takes few probes, and what is far few more."""
    points = [Candidate(str(i), (("length", i),), (math.inf,)) for i in range(72)]
    search = METHODS["bisect"].search(points[::-1], SearchSettings(1, 0, 0.25, 0))
    asked, asks = [], next(search, None)
    while asks:
        (ask,) = asks
        asked.append(int(ask.key))
        told = Response((1.0,)) if asked[-1] < works else Response(None)
        try:
            asks = search.send({ask.key: told})
        except StopIteration:
            break
    fine = [i for i in asked if i < works]
    assert max(fine, default=-1) == works - 1
    assert works == 72 or works in asked
    assert len(asked) == len(set(asked)) <= 12
    assert asked[0] == 71


def test_layers_are_fronts_of_what_is_left() -> None:
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.0, 2.0), (3.0, 3.0), (4.0, 1.0)]
    assert list(layers(points, lambda point: point)) == [
        [(1.0, 3.0), (2.0, 2.0), (2.0, 2.0), (3.0, 1.0)], [(3.0, 3.0), (4.0, 1.0)],
    ]  # fmt: skip
    assert list(layers("badc", lambda name: (float(ord(name) // 98),))) == [["a"], ["b", "d", "c"]]
    assert list(layers([], lambda point: (0.0,))) == []


def test_halving_spends_nothing_on_what_is_surely_worse() -> None:
    """One point is far ahead: from the first rung on it is alone, however much may be spent."""
    cost = LANDSCAPES["plateau"]
    machine = play("halving", candidates(cost), Machine(cost), budget=1.0)
    assert [len(asks) for asks in machine.log][1:] == [1] * (len(machine.log) - 1)
    close = play("halving", candidates(LANDSCAPES["ridge"]), Machine(LANDSCAPES["ridge"]), budget=1)
    assert len(close.log[1]) > 1


def test_halving_leaves_out_what_good_predictions_rule_out() -> None:
    cost = LANDSCAPES["bowl"]
    sure = [replace(one, doubt=0.05) for one in candidates(cost, knows=0.05)]
    machine = play("halving", sure, Machine(cost, noise=0.1), budget=1.0)
    assert cost(*machine.point(machine.best())) == 10
    asked = {key for asks in machine.log for key, *_ in asks}
    assert max(cost(*machine.point(key)) for key in asked) <= 14
    # Predictions that prove worse than they say rule out less.
    wrong = [replace(one, doubt=0.05) for one in candidates(cost, knows=0.5)]
    assert len(play("halving", wrong, Machine(cost, noise=0.1), budget=1.0).samples) > len(asked)
