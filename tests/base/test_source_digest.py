"""Which changes of the source make another measurement, and which do not."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from pathlib import Path

import pytest

from ringray.base import provenance
from ringray.base.source_digest import MEASURED, code_digest, measured_digest, syntax
from ringray.lab.kinds import KINDS
from ringray_kernels.backends import BACKENDS

WALK = "ringray/traffic/walk.py"
LOOP = "ringray/attention/loops/ring.py"
KERNEL = "ringray_kernels/backends/triton/forward.py"


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, ...]:
    for package in provenance.packages():
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.pyc"))
    return tuple(tmp_path / package.name for package in provenance.packages())


def test_a_copy_elsewhere_is_the_same(copies: tuple[Path, ...]) -> None:
    assert measured_digest(copies) == provenance.measured_digest()
    assert code_digest(copies) == provenance.code_digest()


@pytest.mark.parametrize("name", [LOOP, KERNEL])
def test_words_for_people_change_nothing(copies: tuple[Path, ...], name: str) -> None:
    path = copies[0].parent / name
    text = path.read_text()
    known = ast.get_docstring(ast.parse(text), clean=False)
    assert known
    path.write_text("# A comment.\n\n" + text.replace(known, "Something else.", 1) + "\n# End\n")
    assert measured_digest(copies) == provenance.measured_digest()
    assert code_digest(copies) != provenance.code_digest()


@pytest.mark.parametrize("name", [WALK, KERNEL])
def test_one_operator_makes_another_measurement(copies: tuple[Path, ...], name: str) -> None:
    path = copies[0].parent / name
    tree = ast.parse(path.read_text())
    path.write_text(ast.unparse(tree))  # the same syntax in another layout
    assert measured_digest(copies) == provenance.measured_digest()
    changed = next(node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    changed.ops[0] = ast.Lt() if isinstance(changed.ops[0], ast.LtE) else ast.LtE()
    path.write_text(ast.unparse(tree))
    assert measured_digest(copies) != provenance.measured_digest()


@pytest.mark.parametrize("name", ["ringray_kernels/bench/timing.py", "ringray/base/redaction.py"])
def test_code_that_no_rank_measures_with_changes_nothing(
    copies: tuple[Path, ...], name: str
) -> None:
    path = copies[0].parent / name
    path.write_text(path.read_text() + "\nMORE = 1\n")
    assert measured_digest(copies) == provenance.measured_digest()
    assert code_digest(copies) != provenance.code_digest()


def test_a_new_file_in_a_measured_folder_counts(copies: tuple[Path, ...]) -> None:
    (copies[0] / "transport" / "new.py").write_text("")
    assert measured_digest(copies) != provenance.measured_digest()


def test_what_is_listed_exists_and_holds_every_kind_and_backend() -> None:
    folders = {folder.name: folder for folder in provenance.packages()}
    for package, parts in MEASURED.items():
        for part in parts:
            assert (folders[package] / part).exists(), f"{package}/{part}"
    measured = {f"ringray.{part.replace('/', '.')}" for part in MEASURED["ringray"]}
    for name in (*KINDS.values(), *BACKENDS.values()):
        where = name if isinstance(name, str) else name.module
        assert where.startswith("ringray_kernels.") or where.rpartition(".")[0] in measured
        assert importlib.util.find_spec(where)


@pytest.mark.parametrize(
    ("source", "other", "same"),
    [
        ("def f(): return 1", 'def f():\n    """Words."""\n    return (1)  # one', True),
        ("class A: x = 'a' 'b'", "class A:\n  '''Words.'''\n  x = 'ab'", True),
        ("x[1:]", "x[:1]", False),
        ("x = '1'", "x = 1", False),
        ("def f(a, /): 0", "def f(a): 0", False),
    ],
)
def test_the_syntax_counts_and_nothing_else(source: str, other: str, same: bool) -> None:
    assert (syntax(source.encode()) == syntax(other.encode())) == same


def test_the_code_digest_sees_names_and_contents(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    digests = []
    for name, content in (("a.py", "x"), ("a.py", "y"), ("b.py", ""), ("c.txt", "")):
        (package / name).write_text(content)
        digests.append(code_digest([package]))
    assert len(set(digests)) == 3
    assert digests[2] == digests[3]
    assert code_digest([]) != digests[0]
