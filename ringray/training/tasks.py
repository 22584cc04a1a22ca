"""Tasks: sequences made from a seed, and an examination of what a model has learnt from them.

Retrieval  the value of a line, given its name (Liu et al. 2023, arXiv 2310.01889, 5.3)
PointMass  in-context reinforcement learning: to act by trajectories that were seen (its table 5)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from ringray.training.corpus import NO_LABEL, Ints, SequenceRows, one_document

# The likeliest of some tokens after places of sequences: tokens (B, S), places (N,), some -> (B, N)
Answer = Callable[[Ints, Ints, range], Ints]
Policy = Callable[[Ints, Ints], Ints]  # positions (B,), velocities (B,) -> actions (B,)
_EXAMINED = 1 << 32  # number of the first sequence of an examination; no training gets so far


class Task(Protocol):
    """Data of a training, as a ``Corpus``, with an examination. ``vocabulary``: number of tokens;
    ``shortest``: sequence that holds the task; ``passes``: forward passes of one sequence that an
    examination takes."""

    vocabulary: int
    shortest: int
    passes: int

    def rows(self, number: int, seq_len: int, positions: Ints) -> SequenceRows:
        """Returns rows of a sequence, as ``Corpus.rows``."""

    def examine(self, answer: Answer, seq_len: int) -> list[float]:
        """Returns scores from 0 to 1 at sequences of ``seq_len`` tokens."""


class Retrieval:
    """Lines, each a token for its name and value and then noise, and questions: a name, which its
    value follows.

    A sequence has as many lines as it holds, up to ``NAMES``, and the loss is of the values asked
    for. Scores: shares of right values by the depth of their line, in ``DEPTHS`` equal parts.
    """

    NAMES, VALUES, NOISE, LINE, ASKED, DEPTHS = 24, 8, 8, 16, 7, 7
    passes = 96
    _NAME = NOISE + NAMES * VALUES
    _VALUE = _NAME + NAMES
    vocabulary = _VALUE + VALUES
    shortest = (LINE + 2) * ASKED

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def rows(self, number: int, seq_len: int, positions: Ints) -> SequenceRows:
        """Returns rows of a sequence, as ``Corpus.rows``."""
        tokens, labels, _ = self._sequence(number, seq_len)
        return one_document(tokens, labels, positions)

    def examine(self, answer: Answer, seq_len: int) -> list[float]:
        """Returns the shares of right values, lines from the first to the last."""
        each = [self._sequence(_EXAMINED + i, seq_len) for i in range(self.passes)]
        tokens, labels, depths = (np.stack(some) for some in zip(*each, strict=True))
        (places,) = np.nonzero(labels[0] != NO_LABEL)
        answers = answer(tokens, places, range(self._VALUE, self.vocabulary))
        right = answers == labels[:, places]
        return [float(right[depths == depth].mean()) for depth in range(self.DEPTHS)]

    def _sequence(self, number: int, seq_len: int) -> tuple[Ints, Ints, Ints]:
        """Returns tokens, labels, and the depth of each line that is asked for."""
        drawn = np.random.default_rng([self.seed, number])
        questions = seq_len - 2 * self.ASKED
        count = min(questions // self.LINE, self.NAMES)
        names = drawn.permutation(self.NAMES)[:count]
        values = drawn.integers(self.VALUES, size=count)
        asked = drawn.permutation(count)[: self.ASKED]
        tokens = drawn.integers(self.NOISE, size=seq_len)
        tokens[np.arange(count) * (questions // count)] = self.NOISE + names * self.VALUES + values
        tokens[questions::2] = self._NAME + names[asked]
        tokens[questions + 1 :: 2] = self._VALUE + values[asked]
        labels = np.full(seq_len, NO_LABEL)
        labels[questions::2] = self._VALUE + values[asked]
        return tokens, labels, asked * self.DEPTHS // count


class PointMass:
    """Trajectories of a mass on a line, which is rewarded at rest in a goal that only rewards tell.

    A sequence has as many trajectories as it holds, by rising return; each is a token of its return
    (none, some, much), then states and actions. A state is position, velocity and reward; an action
    changes the velocity by -1, 0 or 1. All but the last are of policies that do not know the goal:
    random ones, and scripted ones that go to some place. The last goes to the goal; the loss is of
    its actions. Score: the return of the model's own last trajectories over that of the policy
    which knows the goal.
    """

    PLACES, SPEED, STEPS, EPISODES = 20, 2, 16, 96
    _WIDTH = 2 * SPEED + 1
    _STATES = 2 * PLACES * _WIDTH
    _RETURNS = _STATES + 3  # three actions
    TRAJECTORY = 1 + 2 * STEPS  # tokens
    vocabulary = _RETURNS + 3
    shortest = TRAJECTORY
    passes = EPISODES * STEPS

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def rows(self, number: int, seq_len: int, positions: Ints) -> SequenceRows:
        """Returns rows of a sequence, as ``Corpus.rows``."""
        goal, tokens, first, start = self._known(number, seq_len)
        steps, _ = self._played(goal, start, partial(self.towards, goal))
        tokens[first : first + self.TRAJECTORY] = steps[0]
        labels = np.full(seq_len, NO_LABEL)
        acts = first + 1 + 2 * np.arange(self.STEPS)
        labels[acts] = tokens[acts + 1]
        return one_document(tokens, labels, positions)

    def examine(self, answer: Answer, seq_len: int) -> list[float]:
        """Returns the model's share of the returns that can be had."""
        each = [self._known(_EXAMINED + i, seq_len) for i in range(self.EPISODES)]
        goals, starts = (np.concatenate([episode[i] for episode in each]) for i in (0, 3))
        tokens, place = np.stack([episode[1] for episode in each]), each[0][2]
        tokens[:, place] = self._RETURNS + 2

        def act(position: Ints, speed: Ints) -> Ints:
            nonlocal place
            tokens[:, place + 1] = self._state(position, speed, goals)
            actions = range(self._STATES, self._RETURNS)
            tokens[:, place + 2] = answer(tokens, np.array([place + 1]), actions)[:, 0]
            place += 2
            return tokens[:, place] - self._STATES - 1

        reached = self._played(goals, starts, act)[1].sum()
        return [float(reached / self._played(goals, starts, partial(self.towards, goals))[1].sum())]

    def towards(self, goal: Ints, position: Ints, speed: Ints) -> Ints:
        """Returns the actions after which masses can stop nearest to their goals."""
        actions = np.array([[-1], [0], [1]])
        new = np.clip(speed + actions, -self.SPEED, self.SPEED)
        missed = abs(goal - position - new * (abs(new) + 1) // 2)
        return np.asarray(missed.argmin(0) - 1)

    def _known(self, number: int, seq_len: int) -> tuple[Ints, Ints, int, Ints]:
        """Returns the goal of a sequence, its tokens with all trajectories but the last, where that
        one begins in the sequence, and in what place."""
        drawn = np.random.default_rng([self.seed, number])
        before = seq_len // self.TRAJECTORY - 1
        goal, start = drawn.integers(self.PLACES, size=(2, 1))
        targets, starts = drawn.integers(self.PLACES, size=(2, before))
        scripted = drawn.random(before) < 0.5

        def act(position: Ints, speed: Ints) -> Ints:
            some = drawn.integers(-1, 2, size=before)
            return np.where(scripted, self.towards(targets, position, speed), some)

        steps, gained = self._played(goal, starts, act)
        tokens = np.full(seq_len, self._RETURNS)
        tokens[: steps.size] = steps[np.argsort(gained, kind="stable")].ravel()
        return goal, tokens, steps.size, start

    def _played(self, goal: Ints, start: Ints, policy: Policy) -> tuple[Ints, Ints]:
        """Returns the tokens of trajectories (B, T), and their returns (B,)."""
        position, speed, gained = start, np.zeros_like(start), np.zeros_like(start)
        tokens = []
        for _ in range(self.STEPS):
            action = policy(position, speed)
            tokens += [self._state(position, speed, goal), self._STATES + 1 + action]
            gained = gained + ((position == goal) & (speed == 0))
            speed = np.clip(speed + action, -self.SPEED, self.SPEED)
            moved = position + speed
            position = np.clip(moved, 0, self.PLACES - 1)
            speed = np.where(position == moved, speed, 0)  # a wall
        much = (gained > 0).astype(int) + (gained >= self.STEPS // 4)
        return np.stack([self._RETURNS + much, *tokens], 1), gained

    def _state(self, position: Ints, speed: Ints, goal: Ints) -> Ints:
        rewarded = (position == goal) & (speed == 0)
        return np.asarray((rewarded * self.PLACES + position) * self._WIDTH + speed + self.SPEED)


TASKS: dict[str, type[Retrieval] | type[PointMass]] = {"lines": Retrieval, "point-mass": PointMass}
