"""Fuzzed specs: a spec that makes sense or a SpecError, within bounds of time, and nothing else."""

from __future__ import annotations

import pytest

from tests.fuzz import runner
from tests.fuzz.generate import make

SEED = 20261121
ALL = 10_000
FEW = 60


def test_a_few() -> None:
    results = runner.run_some(SEED, range(ALL, ALL + FEW))
    assert not results.wrong, results.report(SEED)
    # None of it would be worth anything if all were refused at their first letter.
    for what in ("accepted", "refused spec", "refused plan"):
        assert results.counts[what] >= FEW // 20, results.counts


@pytest.mark.exhaustive
def test_ten_thousand() -> None:
    results = runner.run_many(SEED, range(ALL))
    print("\n" + results.report(SEED))
    assert not results.wrong


def test_a_number_brings_a_case_back() -> None:
    assert [make(7, index) for index in range(50)] == [make(7, index) for index in range(50)]
    assert make(7, 1) != make(8, 1)
