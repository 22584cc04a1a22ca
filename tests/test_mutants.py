"""The list of mutants, and the script that applies them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pytest

from tests import mutants
from tests.mutants import REPOSITORY, ListError, Mutant

if TYPE_CHECKING:
    from pathlib import Path


def test_every_mutant_fits_the_tree() -> None:
    listed = mutants.read()
    assert len(listed) >= 60
    for one in listed:
        one.mutated(REPOSITORY)
        for test in one.tests:
            assert (REPOSITORY / test.partition("::")[0]).exists(), (one.name, test)


def mutant(tree: Path, **changes: Any) -> Mutant:
    """A mutant of ``add`` and the test that notices it."""
    (tree / "tests").mkdir(exist_ok=True)
    (tree / "product.py").write_text("def add(a, b):\n    return a + b\n")
    (tree / "tests" / "test_product.py").write_text(
        "import product\ndef test_sum():\n    assert product.add(2, 2) == 4\n"
    )
    (tree / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    given = {
        "name": "minus", "file": "product.py", "old": "a + b", "new": "a - b",
        "tests": ("tests/test_product.py",),
    }  # fmt: skip
    return Mutant(**(given | changes))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mutants.Tree:
    """A tree of its own, as a copy of the checkout would be."""
    made = mutants.Tree.__new__(mutants.Tree)
    made.folder, made._changes = tmp_path, 0
    return made


@pytest.mark.parametrize(
    ("new", "notice"),
    [("a - b", "tests/test_product.py::test_sum"), ("a * b", ""), ("(", "tests/test_product.py")],
)
def test_a_verdict_names_the_test_that_noticed(tree: mutants.Tree, new: str, notice: str) -> None:
    one = mutant(tree.folder, new=new)
    assert tree.verdict(one).notice == notice
    assert "a + b" in (tree.folder / "product.py").read_text(), "it is taken back"


def test_a_time_limit_counts_as_noticed(tree: mutants.Tree) -> None:
    endless = mutant(tree.folder, new="add(a, b) if not __import__('time').sleep(60) else 0")
    assert tree.verdict(mutant(tree.folder, new=endless.new, timeout=3.0)).notice == "time limit"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"old": "a % b"}, "stands 0 times"),
        ({"old": "a"}, "stands 3 times"),
        ({"new": "a + b"}, "are the same"),
        ({"file": "nothing.py"}, "no file"),
        ({"tests": ("tests/test_nothing.py",)}, "no such test"),
    ],
)
def test_a_list_that_does_not_fit_is_an_error(
    tree: mutants.Tree, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ListError, match=says):
        tree.verdict(mutant(tree.folder, **changes))


def test_a_name_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- {name: a, file: f, old: x, new: y, tests: [t]}\n" * 2)
    with pytest.raises(ListError, match="stand twice: a"):
        mutants.read(path)


def test_slices() -> None:
    assert mutants._slice("3/8") == (3, 8)
    for wrong in ("0/8", "9/8", "3", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected K/N"):
            mutants._slice(wrong)
