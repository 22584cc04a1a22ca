"""Results of one process for a batch, in NumPy arrays, and their recording.

Shape legend: B rows of a batch, R tokens of each on this process, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[Any]
# Columns of logits that are told one by one; those of a larger vocabulary become one.
COLUMNS = 4096
# What wrappers put in front of the names of modules and parameters.
_WRAPPERS = re.compile(r"^module\.|(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass
class Observation:
    """Results of one process for a batch.

    Attributes:
        rows: (B, R) the place of each token in the flattened batch of all processes; -1 is padding.
        logits: (B, R, V), fp64; of a large vocabulary the first COLUMNS, and the logarithm of the
            sum of the exponentials of the others.
        loss: of this process, None if the target has none.
        note: what a user has to know of the loss, or "".
        gradients: name -> whole gradient, fp64, after the reduction.
        norm: of the gradients, as the target computes it.
        layers: the name and the output (B, R, ...) of each module with one row per token, in the
            order in which they ran.
        dropped: name -> which elements (B, R, ...) a dropout module set to zero.
    """

    rows: Array
    logits: Any = None  # an array, the others numbers, or None
    loss: Any = None
    note: str = ""
    gradients: dict[str, Array] = field(default_factory=dict)
    norm: Any = None
    layers: list[tuple[str, Array]] = field(default_factory=list)
    dropped: dict[str, Array] = field(default_factory=dict)


def plain_name(name: str) -> str:
    """Returns the name of a module or a parameter without those of wrappers around it."""
    return _WRAPPERS.sub("", name)


def as_array(x: Tensor) -> Array:
    """Returns a tensor's numbers, floating-point ones in fp64; a sharded one whole."""
    x = x.detach()
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    x = x.double() if x.is_floating_point() else x
    array: Array = x.cpu().numpy()
    return array


def of_logits(logits: Tensor) -> Array:
    """Returns logits (B, R, V) as an observation holds them."""
    if logits.shape[-1] > COLUMNS:
        logits = logits.detach().double()
        # The mean cross entropy of labels below COLUMNS is as before.
        rest = logits[..., COLUMNS:].logsumexp(-1, keepdim=True)
        logits = torch.cat([logits[..., :COLUMNS], rest], -1)
    return as_array(logits)


@contextmanager
def recording(model: nn.Module, result: Observation, layers: bool) -> Iterator[None]:
    """Records what dropout modules drop and, if ``layers``, outputs of modules with a row per
    token."""
    shape = result.rows.shape
    calls: dict[str, int] = {}

    def record(name: str, module: nn.Module, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) and out else out
        if not isinstance(first, Tensor) or tuple(first.shape[:2]) != shape:
            return
        # A module that runs several times in a forward counts its calls.
        calls[name] = calls.get(name, 0) + 1
        label = name if calls[name] == 1 else f"{name}#{calls[name]}"
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            result.dropped[label] = as_array((first == 0) & (args[0] != 0))
        if layers and first.is_floating_point():
            result.layers.append((label, as_array(first)))

    hooks = [
        module.register_forward_hook(partial(record, plain_name(name)))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
