"""Imports run one way, and the quick parts import nothing heavy: read from the sources."""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"ringray": ROOT / "ringray", "ringray_kernels": ROOT / "kernels" / "ringray_kernels"}
HEAVY = {"torch", "ray", "mlflow", "triton", "matplotlib"}

# Each may import what stands after it, and nothing that stands before it.
LAYERS = (
    "ringray.cli", "ringray.driver", "ringray.warm", "ringray.cluster", "ringray.ring",
    "ringray.vigil", "ringray.placing", "ringray.autoscaler", "ringray.worker",
    "ringray.kinds", "ringray.models", "ringray.nn", "ringray.attention", "ringray.compiled",
    "ringray.passes", "ringray.problem", "ringray.comm", "ringray_kernels",
)  # fmt: skip
QUICK = (
    "ringray.spec", "ringray.config", "ringray.plan", "ringray.costmodel", "ringray.memory",
    "ringray.steps", "ringray.geometry", "ringray.walk", "ringray.route", "ringray.transport",
    "ringray.partition", "ringray.store", "ringray.environment", "ringray.errors", "ringray.offer",
    "ringray.report.words", "ringray.report.board", "ringray.report.tables", "ringray.report.live",
    "ringray.report.figures", "ringray.report.figures.data", "ringray.tracking_note",
    "ringray.usage", "ringray.tuned", "ringray.choose", "ringray.autotune",
    "ringray.cli", "ringray.cli.specs", "ringray.cli.records", "ringray.cli.jobs", "ringray.jobs",
    "ringray.shipping", "ringray.faults", "ringray.progress", "ringray.ration", "ringray.deadline",
    "ringray_kernels.backends",
)  # fmt: skip
LIBRARY = (
    "ringray.models.sdpa", "ringray.models.huggingface", "ringray.models.masks", "ringray.nn",
    "ringray.loss", "ringray.attention", "ringray.compiled", "ringray.problem", "ringray.comm",
    "ringray.job", "ringray.agreement", "ringray.sharding", "ringray.passes",
    "ringray.passes.walked", "ringray.transport", "ringray.partition",
)  # fmt: skip


# It measures rings on one device and so stands on top of both packages. The kernels do not need it,
# and it imports ringray inside of functions only, so that they install and run without.
ABOVE_BOTH = "ringray_kernels.bench.virtual"


@lru_cache(maxsize=1)
def modules() -> dict[str, Path]:
    """Name -> file of every module of both packages."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _only_for_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def _walk(node: ast.AST, deep: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if _only_for_types(child):
            yield from (one for branch in child.orelse for one in _walk_all(branch))  # type: ignore[attr-defined]
            continue
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if function and not deep:
            continue
        yield child
        yield from _walk(child, deep)


def _walk_all(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    yield from _walk(node, deep=True)


@lru_cache(maxsize=1024)
def imports(name: str, deep: bool = True) -> frozenset[str]:
    """What a module imports when it runs; with ``deep`` also inside its functions."""
    found = set()
    for node in _walk(ast.parse(modules()[name].read_text()), deep):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            base = node.module or ""
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in modules() else base)
    return frozenset(found)


def closure(name: str, deep: bool) -> dict[str, str]:
    """Every module that ``name`` brings in, packages around them too -> what imports it."""
    found: dict[str, str] = {name: ""}
    waiting = [name]
    while waiting:
        here = waiting.pop()
        if here not in modules():
            continue
        parents = [here.rpartition(".")[0]] if "." in here else []
        for one in (*imports(here, deep), *parents):
            if one not in found:
                found[one] = here
                waiting.append(one)
    return found


def tops(found: dict[str, str]) -> dict[str, str]:
    """External packages -> the module of ours that imports them."""
    return {one.partition(".")[0]: by for one, by in found.items() if one not in modules()}


def layer(name: str) -> int | None:
    for index, prefix in enumerate(LAYERS):
        if name == prefix or name.startswith(f"{prefix}."):
            return index
    return None


def test_both_packages_are_found() -> None:
    assert {"ringray", "ringray.spec", "ringray.kinds", "ringray_kernels.api"} <= set(modules())
    assert "torch" in imports("ringray.comm")
    assert "ringray.report.tables" in imports("ringray.cli.specs")
    assert "ringray.report.tables" not in imports("ringray.cli.specs", deep=False)
    assert "ringray.driver" not in imports("ringray.report.live")  # for types only


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_run_downwards(name: str) -> None:
    own = layer(name)
    for one in imports(name):
        other = layer(one)
        if own is not None and other is not None:
            assert other >= own, f"{name} imports {one}, which stands above it"
        if name.startswith("ringray_kernels") and name != ABOVE_BOTH:
            assert not one.startswith("ringray."), f"{name} imports {one}"
        if one == "ringray.cli" or one.startswith("ringray.cli."):
            assert name.startswith(("ringray.cli", "ringray.__main__")), f"{name} imports {one}"


def test_what_measures_rings_imports_them_lazily() -> None:
    assert any(one.startswith("ringray.") for one in imports(ABOVE_BOTH))
    assert not any(one.startswith("ringray.") for one in imports(ABOVE_BOTH, deep=False))


@pytest.mark.parametrize("name", QUICK)
def test_the_quick_parts_import_nothing_heavy(name: str) -> None:
    for one, by in tops(closure(name, deep=False)).items():
        assert one not in HEAVY, f"{name} needs {by}, which imports {one}"


@pytest.mark.parametrize("name", QUICK)
def test_nor_do_their_functions(name: str) -> None:
    assert not HEAVY & {one.partition(".")[0] for one in imports(name)}


@pytest.mark.parametrize("name", [*LIBRARY, *(n for n in modules() if n.startswith("ringray_k"))])
def test_the_library_needs_neither_ray_nor_mlflow(name: str) -> None:
    for one, by in tops(closure(name, deep=True)).items():
        assert one not in {"ray", "mlflow"}, f"{name} needs {by}, which imports {one}"


def test_the_kernels_need_torch_and_triton_only() -> None:
    standard = set(sys.stdlib_module_names)
    for name in modules():
        if name.startswith("ringray_kernels"):
            others = set(tops(dict.fromkeys(imports(name), name))) - standard
            assert others <= {"torch", "triton", "numpy"}, f"{name} imports {others}"


@pytest.mark.parametrize("name", sorted(n for n in modules() if "tracking" not in n))
def test_only_the_tracker_imports_mlflow(name: str) -> None:
    assert "mlflow" not in {one.partition(".")[0] for one in imports(name)}


def test_only_what_draws_imports_matplotlib() -> None:
    drawing = {
        name for name in modules() if "matplotlib" in tops(dict.fromkeys(imports(name), name))
    }
    assert drawing == {"ringray.report.figures.style"}


def test_mlflow_is_not_imported_with_tracking() -> None:
    assert "mlflow" not in tops(closure("ringray.tracking", deep=False))
    assert "mlflow" in tops(closure("ringray.tracking_process", deep=True))


def test_there_are_no_circles() -> None:
    """Module-level imports, of which Python would see one half only."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name in done:
            return
        for one in sorted(imports(name, deep=False)):
            if one in modules():
                visit(one, (*path, name))
        done.add(name)

    for name in modules():
        visit(name, ())


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_file_is_long(name: str) -> None:
    assert len(modules()[name].read_text().splitlines()) <= 365  # "not much beyond 350"
