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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

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

    It is the same under Python 3.11, 3.12 and 3.13.
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
    """Returns a module's syntax tree as text, without docstrings and positions.

    ``ast.dump`` writes the same tree in other words in other versions of Python. Here a field that
    is missing, None or an empty list is not written, so that a version may add optional fields; and
    adjacent literals of an f-string are joined, which versions split at different places.
    """
    words: list[str] = []
    _write(ast.parse(source), words.append)
    return " ".join(words).encode()


def _write(node: Any, write: Callable[[str], None]) -> None:
    """Writes a node, or a value that is none, such as a name or a number."""
    if not isinstance(node, ast.AST):
        write(repr(node))
        return
    write(f"{type(node).__name__}(")
    for name in node._fields:
        value: Any = getattr(node, name, None)
        if name == "body" and isinstance(node, _DOCUMENTED) and ast.get_docstring(node, False):
            value = value[1:]
        elif name == "values" and isinstance(node, ast.JoinedStr):
            value = _joined(value)
        if value is None or value == [] or name == "kind":  # kind: the u of u"text"
            continue
        write(f"{name}=")
        if isinstance(value, list):
            for item in value:
                _write(item, write)
        else:
            _write(value, write)
    write(")")


def _joined(values: list[ast.expr]) -> list[ast.expr | str]:
    """Returns the parts of an f-string with each run of literals as one text."""
    parts: list[ast.expr | str] = []
    for value in values:
        if not isinstance(value, ast.Constant):
            parts.append(value)
        elif parts and isinstance(parts[-1], str):
            parts[-1] += str(value.value)
        elif value.value:
            parts.append(str(value.value))
    return parts
