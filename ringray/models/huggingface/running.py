"""The forward pass in progress of a checked model, which its layers look up."""

from __future__ import annotations

from typing import Protocol

from ringray.models.huggingface.ring import Ring


class ForwardState(Protocol):
    """What a layer asks of the forward pass that it is part of; see ``forward.Forward``."""

    ring: Ring | None

    #: Calls of the ring so far.
    calls: int

    #: The model is being checked: every token attends to itself.
    alone: bool

    #: The pass is of new tokens, with a cache.
    stepping: bool


class Running:
    """The pass of this process."""

    forward: ForwardState | None = None
