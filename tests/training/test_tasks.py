"""Tasks, examined with players whose scores are known."""

from __future__ import annotations

import numpy as np
import pytest

from ringray.attention.sharding import local_positions
from ringray.training.corpus import NO_LABEL, Ints
from ringray.training.tasks import TASKS, PointMass, Retrieval


@pytest.mark.parametrize("name", TASKS)
def test_sequences_follow_from_seed_and_number(name: str) -> None:
    task = TASKS[name](seed=3)
    whole = np.arange(411)
    one = task.rows(7, 411, whole)
    assert (one.tokens == TASKS[name](seed=3).rows(7, 411, whole).tokens).all()
    for other in (TASKS[name](seed=4).rows(7, 411, whole), task.rows(8, 411, whole)):
        assert (one.tokens != other.tokens).any()
    assert 0 <= one.tokens.min() <= one.tokens.max() < task.vocabulary
    asked = one.labels != NO_LABEL
    assert 7 <= asked.sum() <= task.shortest
    (at,) = np.nonzero(asked[:-1])
    assert (one.labels[at] == one.tokens[at + 1]).all()
    assert one.ends.tolist() == [0, 411]


@pytest.mark.parametrize("name", TASKS)
def test_examinations_have_not_been_trained(name: str) -> None:
    task, seen = TASKS[name](), []
    task.examine(
        lambda x, at, some: seen.append(x.copy()) or np.zeros((len(x), len(at)), int) + some.start,
        200,
    )
    trained = {tuple(task.rows(i, 200, np.arange(126)).tokens) for i in range(200)}
    assert len(seen[0]) >= 48
    assert not trained & {tuple(one[:126]) for one in seen[0]}


@pytest.mark.parametrize("name", TASKS)
def test_ranks_read_their_rows(name: str) -> None:
    task = TASKS[name]()
    whole = task.rows(1, 201, np.arange(201))
    for rank in range(4):
        mine = local_positions("zigzag", 201, 4, rank).numpy()
        rows = task.rows(1, 201, mine)
        inside = mine < 201
        assert (rows.tokens[inside] == whole.tokens[mine[inside]]).all()
        assert (rows.labels[inside] == whole.labels[mine[inside]]).all()
        assert (rows.labels[~inside] == NO_LABEL).all()


@pytest.mark.parametrize("seq_len", [Retrieval.shortest, 500, 3000])
def test_lines_are_told_apart_by_name_and_depth(seq_len: int) -> None:
    lines = Retrieval()

    def reader(tokens: Ints, at: Ints, among: range, first: float = 0) -> Ints:
        """Knows the lines behind a share of the sequence."""
        found = []
        for one in tokens:
            known = one[int(first * (seq_len - 2 * Retrieval.ASKED)) : -2 * Retrieval.ASKED]
            pairs = known[known >= Retrieval.NOISE] - Retrieval.NOISE
            values = dict(zip(pairs // Retrieval.VALUES, pairs % Retrieval.VALUES, strict=True))
            found.append([among.start + values.get(name, -1) for name in one[at] - Retrieval._NAME])
        return np.array(found)

    assert lines.examine(reader, seq_len) == [1.0] * Retrieval.DEPTHS
    half = lines.examine(lambda *asked: reader(*asked, 0.5), seq_len)
    assert half[:3] == [0.0] * 3
    assert half[4:] == [1.0] * 3
    drawn = np.random.default_rng(0)
    guessed = lines.examine(lambda x, at, among: drawn.choice(among, (len(x), len(at))), seq_len)
    assert 0.05 < np.mean(guessed) < 0.2  # 1 of 8


def test_a_mass_is_steered_by_what_trajectories_tell() -> None:
    task = PointMass()
    width = 2 * task.SPEED + 1

    def player(tokens: Ints, at: Ints, among: range) -> Ints:
        """Goes to the goal if a state before was rewarded, else to the middle."""
        (place,) = at
        goals = []
        for one in tokens:
            known = [x for x in one[:place] if task.PLACES * width <= x < task._STATES]
            goals.append(known[0] // width - task.PLACES if known else task.PLACES // 2)
        position, speed = np.divmod(tokens[:, place] % (task.PLACES * width), width)
        found = task.towards(np.array(goals), position, speed - task.SPEED)
        return np.asarray(among.start + 1 + found)[:, None]

    scores = [task.examine(player, task.TRAJECTORY * k)[0] for k in (1, 4, 16, 64)]
    assert scores == sorted(scores)
    assert scores[0] < 0.2
    assert scores[1] < 0.6
    assert scores[2] > 0.7
    assert scores[3] > 0.95
    drawn = np.random.default_rng(0)
    guessed = task.examine(lambda x, _, some: drawn.choice(some, (len(x), 1)), 528)
    assert guessed[0] < 0.2


def test_trajectories_of_rising_return_end_at_the_goal() -> None:
    task = PointMass()
    for number in range(20):
        tokens = task.rows(number, 5 * task.TRAJECTORY + 3, np.arange(168)).tokens
        each = tokens[: 5 * task.TRAJECTORY].reshape(5, task.TRAJECTORY)
        rewards = (each[:, 1::2] >= task._STATES // 2).sum(1)
        assert (np.diff(rewards[:4]) >= 0).all()
        assert rewards[4] >= 3
        assert each[4, -2] >= task._STATES // 2  # at rest in the goal
        returns = each[:, 0] - task._RETURNS
        assert (returns == (rewards > 0).astype(int) + (rewards >= task.STEPS // 4)).all()
