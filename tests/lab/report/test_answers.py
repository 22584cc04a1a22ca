"""How often answers are wrong: of simulated sweeps on drifting machines, and of A against A.

``python -m tests.lab.report.test_answers`` prints the rates of docs/compare.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ringray.lab.report import comparison_views as views
from ringray.lab.report import verdict
from ringray.lab.report.comparison import ComparedSide, Comparison, compare
from ringray.lab.store.store import Store
from tests.support.answer_rows import DRIFTS, SHAPES, drifting, side, stored
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
