"""Computation that no mode of the caller alters.

Dispatch modes may hold a result that is changed in place later, as selective checkpoints do;
function modes may put new tensors on another device, as ``torch.set_default_device`` does; autocast
rounds sums; tensors made in inference mode cannot take part in a later backward pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ringray_kernels.checks import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNCHANGED = nullcontext()
_CASTING = ("cpu", "cuda")  # torch refuses to say whether it casts on others


def dispatching() -> bool:
    """Tells whether a dispatch mode of the caller sees the operators of this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns ``tensors`` in the dtype that autocast gives to SDPA."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else ""
    if kind not in _CASTING or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES else x for x in tensors)


def transforming() -> bool:
    """Tells whether a transform of ``torch.func`` or forward-mode AD is active in this thread."""
    level: int = torch.autograd.forward_ad._current_level
    return torch._C._are_functorch_transforms_active() or level >= 0


def without_modes(device: torch.device) -> AbstractContextManager[None]:
    """Turns off dispatch modes, function modes and autocast on ``device`` for a block."""
    casting = device.type in _CASTING and torch.is_autocast_enabled(device.type)
    observed = dispatching() or torch._C._len_torch_function_stack() > 0
    # Most calls have nothing to turn off, and the host's time counts.
    return _off(device, casting) if casting or observed else _UNCHANGED


@contextmanager
def _off(device: torch.device, casting: bool) -> Iterator[None]:
    exact = torch.autocast(device.type, enabled=False) if casting else nullcontext()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), exact:
        yield


@contextmanager
def lasting(device: torch.device) -> Iterator[None]:
    """Turns off inference mode, too: for tensors that outlive the call that makes them."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))  # turns gradients on
            stack.enter_context(torch.no_grad())
        stack.enter_context(without_modes(device))
        yield
