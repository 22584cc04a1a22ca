"""The messages of a pass, recorded so that they can be sent again with nothing computed between.

What one rank posted and what it waited for, in that order: shapes, types and peers, no contents.
Ranks that each play their tape send exactly the messages that the pass sent, through the same
communicators, so that any transport can be timed without its computation and no pass knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ringray.comm.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringray.comm.batch import Pending


class _Blank(NamedTuple):
    """A tensor that was sent to a peer or received from it."""

    send: bool
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    peer: int


@dataclass(frozen=True)
class _Posted:
    """A batch, and what posted it."""

    post: Callable[[Batch], Pending]
    hop: str
    label: str
    operations: tuple[_Blank, ...]

    def batch(self, sources: dict[_Blank, torch.Tensor]) -> Batch:
        """The same batch; what it receives is new, as it is in a pass."""
        batch = Batch(self.hop, self.label)
        for blank in self.operations:
            if blank.send:
                batch.send(sources[blank], blank.peer)
            else:
                new = torch.empty(blank.shape, dtype=blank.dtype, device=blank.device)
                batch.receive(new, blank.peer)
        return batch


class Recording:
    """One rank's messages. Set it as ``METER.tape`` while a pass runs; then ``prepare`` it, and
    ``play`` it as often as you like."""

    def __init__(self) -> None:
        self._turns: list[_Posted | int] = []  # a number: wait for the batch posted at that turn
        self._open: dict[Pending, int] = {}
        self._sources: dict[_Blank, torch.Tensor] = {}

    def posted(self, post: Callable[[Batch], Pending], batch: Batch, pending: Pending) -> None:
        """``post`` has begun ``batch``."""
        blanks = tuple(
            _Blank(send, x.shape, x.dtype, x.device, peer) for send, x, peer in batch.operations
        )
        self._open[pending] = len(self._turns)
        self._turns.append(_Posted(post, batch.hop, batch.label, blanks))

    def waited(self, pending: Pending) -> None:
        """``pending`` is about to be waited for."""
        self._turns.append(self._open.pop(pending))

    def prepare(self) -> None:
        """Make what is sent, so that ``play`` need not: one tensor for all that are alike."""
        for turn in self._turns:
            for blank in () if isinstance(turn, int) else turn.operations:
                if blank.send and blank not in self._sources:
                    # Written, so that no page of it is missing.
                    self._sources[blank] = torch.ones(
                        blank.shape, dtype=blank.dtype, device=blank.device
                    )

    def play(self) -> None:
        """Post and wait as it was recorded, after ``prepare``. All ranks of the ring play at the
        same time."""
        assert not self._open, "a batch was never waited for"
        pending: dict[int, Pending] = {}
        for at, turn in enumerate(self._turns):
            if isinstance(turn, int):
                pending.pop(turn).wait()
            else:
                pending[at] = turn.post(turn.batch(self._sources))
