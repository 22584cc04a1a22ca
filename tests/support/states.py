"""States of torch that a user may set, each a context."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def changed(get: Callable[[], Any], set_: Callable[[Any], object], value: Any) -> Iterator[None]:
    """Sets one value of torch for a while."""
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


class Holding(TorchDispatchMode):
    """Holds every result, and finds those that are changed in place later."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[str, Tensor, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # Views change with what they view, and an empty tensor is there to be filled.
        views = any(x.alias_info for x in func._schema.returns)
        made = not func._schema.is_mutable and not views and "empty" not in str(func)
        for x in torch.utils._pytree.tree_leaves(out) if made else ():
            if isinstance(x, Tensor) and not x.is_inference():
                self.held.append((str(func), x, x._version))
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        changed = {name for name, x, version in self.held if x._version != version}
        assert not changed, f"changed in place: {changed}"


class Doubling(TorchFunctionMode):
    """Changes what products and exponentials return to whoever lets it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        return out * 2 if name in ("__matmul__", "exp", "exp_", "sigmoid", "sub_") else out


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16 by default": functools.partial(
        changed, torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16
    ),
    "fp64 by default": functools.partial(
        changed, torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "device by default": functools.partial(changed, lambda: None, torch.set_default_device, "meta"),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "deterministic": functools.partial(
        changed, lambda: False, torch.use_deterministic_algorithms, True
    ),
    "three threads": functools.partial(changed, torch.get_num_threads, torch.set_num_threads, 3),
    "dispatch mode": Holding,
    "function mode": Doubling,
    "anomalies": lambda: torch.autograd.detect_anomaly(check_nan=False),
}
WITHOUT_GRADIENTS = ("inference", "no gradients")
