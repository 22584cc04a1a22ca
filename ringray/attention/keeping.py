"""Checkpoints that keep the results of ring attention, so no rank sends twice."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

# Selective checkpoints see operators only, so ring_attention is one while this is set.
KEEPING: ContextVar[bool] = ContextVar("keeping", default=False)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns contexts of the forward pass and of its repetition, a ``context_fn`` of
    ``torch.utils.checkpoint.checkpoint``: out and lse of ``ring_attention`` are kept, and what
    ranks exchanged on transports that exchange heads; everything else is computed again.

    Example::

        checkpoint(layer, x, use_reentrant=False, context_fn=ringray.nn.keep_attention)
    """
    operators = [torch.ops.ringray.attention.default]
    first, again = create_selective_checkpoint_contexts(operators)
    if torch.compiler.is_compiling():  # which takes no other contexts, and has operators
        return first, again
    return _within(first), _within(again)


@contextmanager
def _within(context: Any) -> Iterator[None]:
    token = KEEPING.set(True)
    try:
        with context:
            yield
    finally:
        KEEPING.reset(token)
