"""Checkpoints that keep the results of ring attention, so no rank sends twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns contexts of the forward pass and of its repetition, a ``context_fn`` of
    ``torch.utils.checkpoint.checkpoint``: out and lse of ``ring_attention`` are kept, and what
    ranks exchanged on transports that exchange heads; everything else is computed again.

    Example::

        checkpoint(layer, x, use_reentrant=False, context_fn=ringray.nn.keep_attention)
    """
    # Both contexts are dispatch modes, in which ring_attention is this operator.
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts([torch.ops.ringray.attention.default])
    return contexts
