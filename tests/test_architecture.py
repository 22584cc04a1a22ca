"""The order of packages, read from the sources: imports go down, those for types only counted too.

``python -m pytest -s tests/test_architecture.py -k order`` prints the order and who imports whom.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"ringray": ROOT / "ringray", "ringray_kernels": ROOT / "kernels" / "ringray_kernels"}

# A package may import those of the lines before its own, and itself.
ORDER = (
    "ringray.base",
    "ringray.partition",
    "ringray.traffic",
    "ringray.transport",
    "ringray_kernels",
    "ringray.tuning",
    "ringray.instruments",
    "ringray.comm",
    "ringray.attention",
    "ringray.nn",
    "ringray.models",
    "ringray.training",
    "ringray.plugins",
    "ringray.verification",
    "ringray",  # the public API: the end of the library
    "ringray.lab",
    "ringray.lab.trial",
    "ringray.lab.search",
    "ringray.lab.store",
    "ringray.lab.kinds",
    "ringray.lab.predict",
    "ringray.lab.calibrate",
    "ringray.lab.specs",
    "ringray.lab.plan",
    "ringray.lab.cluster",
    "ringray.lab.ring",
    "ringray.lab.driver",
    "ringray.lab.report",
    "ringray.lab.tracking",
    "ringray.lab.listeners",
    "ringray.lab.opening",
    "ringray.lab.sweeps",
    "ringray.lab.cli",
    "ringray.__main__",
)
LIBRARY = ORDER[: ORDER.index("ringray.lab")]


@lru_cache(maxsize=1)
def modules() -> dict[str, Path]:
    """Name -> file of every module of both packages."""
    found = {}
    for package, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@lru_cache(maxsize=1024)
def imports(name: str) -> frozenset[str]:
    """Everything that a module imports: at its top, in functions, and for types only."""
    found = set()
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {one if one in modules() else str(node.module) for one in whole}
    return frozenset(found)


def package(name: str) -> str:
    """The longest entry of ORDER that holds ``name``; of ``ringray`` itself only its own names."""
    around = [
        one for one in ORDER if name == one or (name.startswith(f"{one}.") and one != "ringray")
    ]
    return max(around, key=len)


@lru_cache(maxsize=1)
def arrows() -> dict[tuple[str, str], tuple[str, str]]:
    """(package, imported package) -> an import that makes it so."""
    return {
        (package(name), package(one)): (name, one)
        for name in modules()
        for one in imports(name)
        if one in modules() and package(one) != package(name)
    }


def test_order_of_packages() -> None:
    for name in ORDER:
        below = [one for one in ORDER if (name, one) in arrows()]
        print(f"{name:<20} {' '.join(below)}")
    wrong = {
        f"{name} imports {one}"
        for (importing, imported), (name, one) in arrows().items()
        if ORDER.index(imported) > ORDER.index(importing)
    }
    assert not wrong


def test_no_module_imports_itself_by_way_of_others() -> None:
    ours = {name: imports(name) & modules().keys() - {name} for name in modules()}
    while ends := {name for name, imported in ours.items() if not imported & ours.keys()}:
        ours = {name: imported for name, imported in ours.items() if name not in ends}
    assert not ours, "a circle, and what imports it"


def test_the_library_names_neither_ray_nor_mlflow() -> None:
    for name in modules():
        if package(name) in LIBRARY:
            assert not {module.partition(".")[0] for module in imports(name)} & {"ray", "mlflow"}, (
                name
            )


def test_the_kernels_need_torch_and_triton_only() -> None:
    standard = set(sys.stdlib_module_names)
    for name in modules():
        if package(name) == "ringray_kernels":
            others = {one.partition(".")[0] for one in imports(name)} - standard
            assert others <= {"ringray_kernels", "torch", "triton", "numpy"}, f"{name}: {others}"


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import ringray.lab", {"torch", "ray", "mlflow", "pandas", "numpy", "pydantic", "rich"}),
        ("import ringray.lab.sweeps", {"torch", "ray", "mlflow", "pandas", "matplotlib"}),
        ("import ringray", {"torch", "ray", "mlflow", "triton", "numpy", "pydantic"}),
        ("import ringray.lab.cli.spec", {"torch", "ray", "mlflow", "triton", "altair"}),
        ("import ringray.lab.cli.store", {"torch", "ray", "mlflow", "numpy", "pydantic"}),
        ("import ringray.lab.tracking.tracker", {"torch", "mlflow", "triton", "altair"}),
        ("import ringray.attention, ringray.nn, ringray.models.sdpa", {"ray", "mlflow"}),
        ("import ringray_kernels.api", {"ringray", "ray", "mlflow"}),
    ],
)
def test_what_must_be_quick_imports_nothing_heavy(statement: str, heavy: set[str]) -> None:
    code = f"import sys; {statement}; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_plan_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; sys.argv = ['ringray', 'plan', 'experiments/quickstart.yaml']\n"
        "from ringray.lab.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(*sorted({'torch', 'ray', 'mlflow', 'triton', 'altair'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("library", "package_of_it"),
    [("mlflow", "ringray.lab.tracking"), ("altair", "ringray.lab.report")],
)
def test_only_one_package_imports(library: str, package_of_it: str) -> None:
    for name in modules():
        if library in {one.partition(".")[0] for one in imports(name)}:
            assert package(name) == package_of_it, name


def test_a_class_name_exists_once() -> None:
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}
