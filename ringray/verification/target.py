"""The target of a verification: a model, and how its batches are dealt to ranks.

A target is a Python file with a function ``build()``, or ``module:function``. What else the file
may define, functions and constants, is in docs/verify.md; the defaults of those are the adapter's,
and below them those of ``defaults``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ringray.base.errors import UserError, unknown

ADAPTERS = {
    "ring": "ring:RingAdapter",
    "parallelize": "ring:ParallelizeAdapter",
    "torch-context-parallel": "torch_context_parallel:TorchContextParallel",
    "torch-flex": "torch_flex:TorchFlex",
    "accelerate": "torch_context_parallel:AccelerateAdapter",
    "hf-ulysses": "ulysses:UlyssesAdapter",
    "ddp": "data_parallel:DdpAdapter",
    "fsdp": "data_parallel:FsdpAdapter",
}
DEFAULT = "ring"
FUNCTIONS = (
    "reference", "prepare", "shard", "context", "step", "reduce", "grad_norm", "save", "load",
    "generate",
)  # fmt: skip
LEAST_VOCABULARY = 4  # tokens, so that another one can stand in the place of each
# Constants -> the choices, or the least integer.
CONSTANTS: dict[str, tuple[str, ...] | int] = {
    "LOSS": ("mean", "sum"),
    "UNIT": 1,
    "BATCH": 1,
    "VOCABULARY": LEAST_VOCABULARY,
    "SEQ_LEN": 8,
}
_NEAR = 0.81  # of a misspelling to a known name; below are names that helpers have


class TargetError(UserError):
    """A target that cannot be verified: nothing was compared."""


def importable_name(build: str | Callable[..., Any]) -> str:
    """Returns the text by which other processes find ``build``.

    Raises:
        TargetError: there is no such file; or a function has no name of its own, such as a lambda
            or a local one, or stands in no file, such as one of a notebook.
    """
    if isinstance(build, str):
        place = build.partition(":")[0]
        if place.endswith(".py") and not Path(place).is_file():
            raise TargetError(f"{build}: there is no file {Path(place).absolute()}")
        return build
    name = getattr(build, "__qualname__", type(build).__name__)
    file = getattr(sys.modules.get(getattr(build, "__module__", "")), "__file__", None)
    if not callable(build) or "." in name or "<" in name or file is None:
        raise TargetError(
            f"build: got {name}, expected a function of a module or a file, or its name: each rank "
            "is a process of its own and imports it"
        )
    # The main program has another name in the processes of the ranks.
    return f"{file if build.__module__ == '__main__' else build.__module__}:{name}"


def make_adapter(text: str | None) -> Any:
    """Returns an adapter by its name and, behind a colon, its arguments: ``ring:zigzag,ulysses``.

    Raises:
        TargetError: there is none, it takes other arguments, or it needs what is not installed.
    """
    name, _, words = (text or DEFAULT).partition(":")
    if name not in ADAPTERS:
        raise TargetError(unknown("adapter", name, ADAPTERS))
    module, _, kind = ADAPTERS[name].partition(":")
    made = getattr(importlib.import_module(f"ringray.verification.adapters.{module}"), kind)
    package = getattr(made, "PACKAGE", None)
    if package is not None and importlib.util.find_spec(package) is None:
        raise TargetError(
            f"this adapter needs {package}, which is not installed: pip install {package}"
        )
    try:
        return made(*filter(None, words.split(",")))
    except (TypeError, ValueError) as error:
        raise TargetError(f"adapter {text}: {error}") from error


def load(text: str, adapter: str | None = None, *, alone: bool = False) -> SimpleNamespace:
    """Returns the functions and constants of the target that ``text`` names, above those of an
    adapter; ``alone``: those by which one process runs it.

    Raises:
        TargetError: it has no such function, or misspells a name, or has a constant of a wrong
            value; or whatever its import raises.
    """
    defaults: Any = importlib.import_module("ringray.verification.defaults")
    place, _, name = text.partition(":")
    below = make_adapter(adapter)
    path = Path(place).absolute() if place.endswith(".py") else None
    # Behind the standard library: neither a target nor its neighbour types.py hides a part of it.
    standard = str(Path(os.__file__).parent)
    places = [n for n, x in enumerate(sys.path) if x in (standard, f"{standard}/lib-dynload")]
    sys.path.insert(max(places) + 1, str(Path.cwd() if path is None else path.parent))
    module = importlib.import_module(place) if path is None else _file(path)
    layers = [defaults, below]
    if path is not None or not name:  # functions beside one that was named may be of something else
        _check_constants(module)
        layers.append(module)
    if path is not None:
        _check_names(module, ast.parse(path.read_bytes()))
    target = SimpleNamespace(build=getattr(module, name or "build", None))
    if not callable(target.build):
        raise TargetError(
            f"it has no function {name or 'build'}(); it has "
            f"{', '.join(_functions(module)) or 'none'}"
        )
    for layer in layers:
        for attribute in (*FUNCTIONS, *CONSTANTS):
            value = getattr(layer, attribute, None)
            if callable(value) or (attribute in CONSTANTS and value is not None):
                setattr(target, attribute, value)
    defaults.loss_is = target.LOSS
    target.own_shard = hasattr(layers[-1], "shard") and layers[-1] is not below
    if alone:
        target.build = getattr(target, "reference", target.build)
        for neutral in (defaults.prepare, defaults.shard, defaults.context, defaults.reduce):
            setattr(target, neutral.__name__, neutral)
    return target


def _functions(module: ModuleType) -> list[str]:
    """Returns the names of the functions that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]


def _check_constants(module: ModuleType) -> None:
    """Raises TargetError for constants of wrong values."""
    for name in CONSTANTS.keys() & vars(module).keys():
        value, allowed = getattr(module, name), CONSTANTS[name]
        if isinstance(allowed, tuple):
            if value not in allowed:
                raise TargetError(unknown(name, value, allowed))
        elif type(value) is not int or value < allowed:
            raise TargetError(f"{name}: got {value!r}, expected an integer from {allowed}")


def _check_names(module: ModuleType, source: ast.Module) -> None:
    """Raises TargetError for names of a file that are almost known ones: those would be ignored."""
    close = {x: get_close_matches(x, ("build", *FUNCTIONS), 1, _NEAR) for x in _functions(module)}
    assigned = [x for node in source.body if isinstance(node, ast.Assign) for x in node.targets]
    for name in [x.id for x in assigned if isinstance(x, ast.Name) and x.id.isupper()]:
        longer = [x for x in CONSTANTS if x.startswith(name) and len(name) > 2]  # VOCAB, SEQ
        close[name] = get_close_matches(name, CONSTANTS, 1, _NEAR) or longer
    for name, known in close.items():
        # Beside a function of the right name, or behind _, it is a helper.
        if known and not name.startswith("_") and not hasattr(module, known[0]):
            raise TargetError(
                f"{name} is ignored, did you mean {known[0]}? If it is a helper, name it _{name}"
            )


def _file(path: Path) -> ModuleType:
    """Imports a file as a module, by a name that no other module has."""
    name = f"ringray_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
