"""The list of mutants, and the script that applies them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import REPOSITORY, ListError, Mutant


def test_every_mutant_fits_the_tree() -> None:
    listed = mutants.read()
    assert len({mutant.name for mutant in listed}) == len(listed)
    for mutant in listed:
        mutant.mutated(REPOSITORY)
        for test in mutant.tests:
            assert (REPOSITORY / test.partition("::")[0]).exists(), (mutant.name, test)


@pytest.fixture
def minus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mutant:
    """A mutant of ``add`` in a tree of its own, with the test that notices it."""
    (tmp_path / "product.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_product.py").write_text(
        "import product\ndef test_sum():\n    assert product.add(2, 2) == 4\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    monkeypatch.setattr(mutants, "REPOSITORY", tmp_path)
    monkeypatch.setattr(
        mutants, "copy_tree", lambda tree: mutants.shutil.copytree(tmp_path, tree, dirs_exist_ok=1)
    )
    return Mutant("minus", "product.py", "a + b", "a - b", ("test_product.py",))


@pytest.mark.parametrize(
    ("new", "noticed"), [("a - b", True), ("a * b", False), ("(", True), ("endless()", True)]
)
def test_a_mutant_is_noticed_or_survives(minus: Mutant, new: str, noticed: bool) -> None:
    assert mutants.judge(replace(minus, new=new)) is noticed


def test_a_list_that_does_not_fit_is_an_error(minus: Mutant) -> None:
    with pytest.raises(ListError, match="stands 3 times"):
        mutants.judge(replace(minus, old="a"))
    with pytest.raises(ListError, match="no test ran"):
        mutants.judge(replace(minus, tests=("test_nothing.py",)))
