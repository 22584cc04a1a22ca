"""A stand-in for a device that must not be waited for: what a GPU would synchronise for is refused.

That is reading a tensor's elements, sizes that depend on them, copies to another device, and tables
made on the host. Tensors in host memory are exempt: those by which ranks agree, and document
boundaries. So is Triton's interpreter, which has to read what it computes with.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_CALLS = {
    "item", "tolist", "numpy", "cpu", "cuda", "tensor", "as_tensor", "from_numpy", "allclose",
    "nonzero", "unique", "masked_select", "pin_memory", "__array__", "__bool__", "__int__",
    "__float__", "__index__", "__complex__",
}  # fmt: skip
_OPERATORS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2",
    "unique_dim", "item", "repeat_interleave", "_pin_memory",
}  # fmt: skip
_EXEMPT = {
    ("ring.py", "largest"), ("documents.py", "boundaries"), ("documents.py", "document_boundaries"),
}  # fmt: skip


class HostReadError(AssertionError):
    """The host would wait for its device."""


def _exempt() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        name = Path(frame.f_code.co_filename).name
        if (name, frame.f_code.co_name) in _EXEMPT or name == "interpreter.py":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _CALLS and not _exempt():
            raise HostReadError(f"{name} of {args[:1]}")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        of_a_mask = name == "index" and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if (name in _OPERATORS or of_a_mask) and not _exempt():
            raise HostReadError(f"{func} of {args[:1]}")
        found = func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            devices = {x.device for x in (*args, found) if isinstance(x, torch.Tensor)}
            if len(devices) > 1 and not _exempt():
                raise HostReadError(f"{func} between {devices}")
        return found


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Refuses what would synchronise, in this thread and in backward passes that it runs."""
    # The op would hide from modes, and take another way beneath them.
    with (
        mock.patch("ringray_kernels.modes._off", return_value=contextlib.nullcontext()),
        mock.patch("ringray.attention.op.dispatching", return_value=False),
        _Calls(),
        _Operators(),
    ):
        yield
