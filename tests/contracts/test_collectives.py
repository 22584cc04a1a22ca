"""Every public function that communicates: a mistake of one rank is its own error there and a
``RefusedError`` that names it on the others, and the next call of all ranks works.

A public name that is neither in ``COLLECTIVES`` nor in ``LOCAL`` fails a test.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import ringray
import ringray.nn
from ringray.attention.agreement import RefusedError
from tests.support.collectives import COLLECTIVES
from tests.support.collectives.collective import Collective
from tests.support.collectives.training import steps
from tests.support.ranks import on_ring

# Public names that send nothing.
LOCAL = {
    "Blocks", "deal", "local_positions", "shard", "tuned_strategy", "keep_attention",
    "next_token_labels", "verify",
}  # fmt: skip


def test_every_public_function_is_here() -> None:
    assert {*ringray.__all__, *ringray.nn.__all__} == {
        *(name for name in COLLECTIVES if name.isidentifier()), *LOCAL
    }  # fmt: skip


def test_a_mistake_is_told_on_every_rank(tmp_path: Path) -> None:
    on_ring(3, [partial(told, name) for name in COLLECTIVES] + [partial(trained, tmp_path)])


def told(name: str, rank: int, size: int) -> None:
    check(name, COLLECTIVES[name](), rank, size)


def trained(folder: Path, rank: int, size: int) -> None:
    check("training", steps(folder), rank, size)


def check(name: str, collective: Collective, rank: int, size: int) -> None:
    """Makes the last rank take every wrong call, while the others take the right one."""
    last = size - 1
    for says, call in {**collective.wrong, **collective.other}.items():
        error: Exception | None = None
        try:
            call() if rank == last else collective.right()
        except Exception as raised:
            error = raised
        case = f"{name}, {says}: {error!r}"
        if says in collective.other:
            assert isinstance(error, ValueError), case
            assert "disagree" in str(error), case
            assert re.search(says, str(error)), case
        else:
            assert isinstance(error, RefusedError) == (rank != last), case
            expected = says if rank == last else rf"rank\(s\) {last} were "
            assert re.search(expected, str(error)), case
        collective.right()
