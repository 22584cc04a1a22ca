"""The target of a verification: a model, and how its batches are dealt to ranks.

A target is a Python file, or ``module:function``. The file has a function ``build()`` that returns
the model, with the same weights in every process; everything else has a default, which is the
adapter's:

reference   ``reference()``: the model for one process, where ``build()`` has none of its own
prepare     ``prepare(model)``: wraps or changes the model of one rank; returns it
shard       ``shard(batch)``: this rank's part of a batch, a dict of tensors
context     ``context()``: a context manager around a forward and its backward
step        ``step(model, batch)``: a forward; returns {"logits": ..., "loss": ...}
reduce      ``reduce(model)``: sums or averages gradients, if no wrapper does
grad_norm   ``grad_norm(model)``: the norm of all gradients, as the training clips it
save        ``save(model, optimizer)``: the state of a training, of this rank
load        ``load(model, optimizer, state)``: puts it into a model and an optimizer that are new
generate    ``generate(model, input_ids, new)``: the tokens with ``new`` more ones, greedily

``build()`` may return ``(model, shard)`` instead of a function ``shard`` beside it. Constants:
``LOSS``: ``"mean"`` if the losses of the ranks average to the loss, ``"sum"`` if they add up to it;
``UNIT``: lengths of sequences are multiples of ``UNIT`` x ranks; ``BATCH``: rows of a batch;
``VOCABULARY``: token ids are below it; ``SEQ_LEN``: least tokens of a sequence.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ringray.base.errors import UserError, unknown

Batch = dict[str, Tensor]

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
_FUNCTIONS = (
    "reference", "prepare", "shard", "context", "step", "reduce", "grad_norm", "save", "load",
    "generate",
)  # fmt: skip
_CONSTANTS = "LOSS", "UNIT", "BATCH", "VOCABULARY", "SEQ_LEN"


class TargetError(UserError):
    """A target that cannot be verified: nothing was compared."""


@dataclass
class VerifiedTarget:
    """The functions of a target, each from its file, the adapter or the defaults."""

    name: str
    build: Callable[[], Any]
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """Builds the model; ``build`` may bring ``shard`` with it."""
        built = self.build()
        if isinstance(built, tuple) and len(built) == 2 and callable(built[1]):
            built, self.functions["shard"] = built
        if not isinstance(built, nn.Module):
            raise TargetError(
                f"build() returned {type(built).__name__}, expected a torch.nn.Module or (model, "
                "shard)"
            )
        return built

    def call(self, name: str, *args: Any) -> Any:
        """Calls one of the functions."""
        return self.functions[name](*args)

    def context(self) -> AbstractContextManager[Any]:
        return self.call("context")


def spelled(build: str | Callable[..., Any]) -> str:
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


def load(text: str, adapter: str | None = None) -> VerifiedTarget:
    """Returns the target that ``text`` names, with the functions of an adapter below its own.

    Raises:
        TargetError: it has no such function; or whatever its import raises.
    """
    place, _, name = text.partition(":")
    below = make_adapter(adapter)
    path = Path(place).absolute() if place.endswith(".py") else None
    # Behind the standard library: neither a target nor its neighbour types.py hides a part of it.
    standard = str(Path(os.__file__).parent)
    places = [n for n, x in enumerate(sys.path) if x in (standard, f"{standard}/lib-dynload")]
    sys.path.insert(max(places) + 1, str(Path.cwd() if path is None else path.parent))
    module = importlib.import_module(place) if path is None else _file(path)
    build = getattr(module, name or "build", None)
    if not callable(build):
        names = [x for x, value in vars(module).items() if inspect.isfunction(value)]
        raise TargetError(
            f"it has no function {name or 'build'}(); it has {', '.join(names) or 'none'}"
        )
    target = VerifiedTarget(text, build)
    # Functions beside one that was named may be of something else.
    beside = () if name and path is None else (module,)
    defaults = importlib.import_module("ringray.verification.defaults")
    for layer in (defaults, below, *beside):
        functions = {x: getattr(layer, x, None) for x in _FUNCTIONS}
        target.functions |= {x: function for x, function in functions.items() if callable(function)}
        target.constants |= {x: getattr(layer, x) for x in _CONSTANTS if hasattr(layer, x)}
    if target.functions["reduce"] is defaults.reduce:
        target.functions["reduce"] = partial(defaults.reduce, loss=target.constants["LOSS"])
    return target


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
