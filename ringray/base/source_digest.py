"""Digests of the source: of all of it, and of the part that can change a measured number.

:func:`code_digest` covers every byte: a ring refuses ranks whose digest differs.
:func:`measured_digest` names a measurement: stored points and tuned choices hold for one value of
it. It covers the modules that a rank executes between the configuration of a trial and its metrics
(:data:`MEASURED`), and only their syntax: not docstrings, comments and layout. It leaves out

- modules that start, watch, limit or describe a rank (``base``, ``lab/trial/faults.py``, ...);
- ``tuning``: the driver looks choices up and sends them in the configuration, which a point's
  digest covers, and ranks look up nothing;
- ``lab/trial/metrics.py``, mostly headings: a metric that ranks combine in another way needs
  another name;
- ``bench`` and ``inspect`` of the kernels: benchmarks and reports of the compiler.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

# Package -> its measured files and folders; "." is all of it but UNMEASURED.
_LIBRARY = ("partition", "traffic", "transport", "instruments", "comm", "attention")
_OF_LAB = ("lab/kinds", "lab/ring/actor.py", "lab/trial/config.py", "lab/trial/measurement.py")
MEASURED = {"ringray": (*_LIBRARY, *_OF_LAB), "ringray_kernels": (".",)}
UNMEASURED = ("bench", "inspect")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_digest(packages: Iterable[Path]) -> str:
    """Returns sha256 (hex) over the names and contents of all Python files of ``packages``."""
    return _digest((name, path.read_bytes()) for name, path in _sources(packages))


def measured_digest(packages: Iterable[Path]) -> str:
    """Returns sha256 (hex) over the names and the syntax of the measured files of ``packages``.

    Another version of Python may write the same syntax in another way: what it measures is another
    measurement, too.
    """
    sources = _sources(packages)
    return _digest((name, syntax(path.read_bytes())) for name, path in sources if _measured(name))


def _sources(packages: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Yields the Python files of ``packages``, sorted, each with its name from the package on."""
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            yield path.relative_to(package.parent).as_posix(), path


def _measured(name: str) -> bool:
    package, _, inside = name.partition("/")
    parts = MEASURED.get(package, ())
    if any(inside.startswith(f"{folder}/") for folder in UNMEASURED):
        return False
    return any(part in (".", inside) or inside.startswith(f"{part}/") for part in parts)


def _digest(contents: Iterable[tuple[str, bytes]]) -> str:
    total = hashlib.sha256()
    for name, content in contents:
        # The length keeps two files from being mistaken for one with both contents.
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def syntax(source: bytes) -> bytes:
    """Returns a module's syntax tree as text, without docstrings and positions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree).encode()
