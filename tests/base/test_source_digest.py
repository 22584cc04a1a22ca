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
KERNEL = "ringray_kernels/backends/triton/forward.py"
UNMEASURED = ("ringray_kernels/bench/timing.py", "ringray/base/redaction.py")


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, ...]:
    """Both packages with some of their files."""
    folders = {package.name: package for package in provenance.packages()}
    for name in (WALK, KERNEL, *UNMEASURED):
        package, _, inside = name.partition("/")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folders[package] / inside, tmp_path / name)
    return tmp_path / "ringray", tmp_path / "ringray_kernels"


@pytest.mark.parametrize("name", [WALK, KERNEL])
def test_only_other_syntax_makes_another_measurement(copies: tuple[Path, ...], name: str) -> None:
    path = copies[0].parent / name
    measured, code, text = measured_digest(copies), code_digest(copies), path.read_text()
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    assert docstring
    path.write_text("# A comment.\n\n" + text.replace(docstring, "Other words.", 1) + "\n# End\n")
    assert measured_digest(copies) == measured
    assert code_digest(copies) != code
    tree = ast.parse(text)
    path.write_text(ast.unparse(tree))  # the same syntax in another layout
    assert measured_digest(copies) == measured
    changed = next(node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    changed.ops[0] = ast.Lt() if isinstance(changed.ops[0], ast.LtE) else ast.LtE()
    path.write_text(ast.unparse(tree))
    assert measured_digest(copies) != measured


def test_only_files_with_which_ranks_measure_count(copies: tuple[Path, ...]) -> None:
    measured, code = measured_digest(copies), code_digest(copies)
    for name in UNMEASURED:
        path = copies[0].parent / name
        path.write_text(path.read_text() + "\nMORE = 1\n")
    assert measured_digest(copies) == measured
    assert code_digest(copies) != code
    (copies[0] / "traffic" / "new.py").write_text("")
    assert measured_digest(copies) != measured


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
