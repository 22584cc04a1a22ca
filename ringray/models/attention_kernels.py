"""PyTorch's attention kernels, which refuse to run beside a ring.

During a block of ``context_parallel`` attention over a rank's own rows would be wrong without a
word. A mode routes what Python code calls on the thread of the block. Scripted code, other threads
and direct calls of fused operators end in the kernels that are guarded here; composed operators
and Triton kernels of other libraries do not.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ringray.attention import loops

_ATTENTION = re.compile(r"attention|attn|_transformer_encoder_layer_fwd")
# Composed of operators that are not attention, so it has no kernel of its own.
_MATH = "aten::_scaled_dot_product_attention_math"
_lock = threading.Lock()
_open: list[torch.library.Library] = []  # of the blocks that are open; the first one has kernels


@contextmanager
def kernels_refuse() -> Iterator[None]:
    """Lets attention kernels refuse every caller but the ring, in all threads of the process."""
    with _lock:
        library = torch.library.Library(torch.ops.aten.name, "IMPL") if not _open else _open[0]
        if not _open:
            _guard(library)
        _open.append(library)
    try:
        yield
    finally:
        with _lock:
            _open.pop()
            del library  # the last reference ends the guard


def _guard(library: torch.library.Library) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    with warnings.catch_warnings():  # PyTorch warns of the first kernel that is replaced
        warnings.simplefilter("ignore", UserWarning)
        for name, device in ((name, device) for name in names for device in ("CPU", "CUDA")):
            forward = name.startswith("aten::") and "backward" not in name
            if name == _MATH or (forward and _ATTENTION.search(name) and has_kernel(name, device)):
                kernel = None if name == _MATH else torch.library.get_kernel(name, device)
                library.impl(name, _guarded(name, kernel), device, with_keyset=True)


def _guarded(name: str, kernel: Any) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if kernel is None or not loops.HERE.attending:
            raise ValueError(
                f"context_parallel: got a call of {name} that was not routed, from scripted code, "
                "another thread or directly, expected scaled_dot_product_attention called by "
                "Python code on the thread of the block"
            )
        return kernel.call_boxed(keys, *args, **kwargs)

    return run


def other_attention(func: object) -> bool:
    """Tells whether ``func`` is an operator that attends, of PyTorch or of another library."""
    name = str(func) if isinstance(func, OpOverload | OpOverloadPacket) else ""
    ours = name.startswith("ringray.") or loops.HERE.attending
    return bool(_ATTENTION.search(name)) and "backward" not in name and not ours
