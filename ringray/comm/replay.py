"""Recorded messages of a pass, to be sent again without the computation between them.

A recording holds the posts and waits of one rank in order: shapes, dtypes and peers, no contents.
Ranks that all play their recordings send exactly the messages of the pass, through the same
communicators. So any transport can be timed without its computation, and no pass knows about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ringray.comm.batch import Batch, Pending


class _Blank(NamedTuple):
    """Shape and peer of a tensor that was sent or received."""

    send: bool
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    peer: int


@dataclass(frozen=True)
class _Posted:
    """A batch, and the function that posted it."""

    post: Callable[[Batch], Pending]
    hop: str
    label: str
    operations: tuple[_Blank, ...]

    def batch(self, sources: dict[_Blank, torch.Tensor]) -> Batch:
        """Makes the same batch; tensors to receive into are new, as in a pass."""
        batch = Batch(self.hop, self.label)
        for blank in self.operations:
            if blank.send:
                batch.send(sources[blank], blank.peer)
            else:
                new = torch.empty(blank.shape, dtype=blank.dtype, device=blank.device)
                batch.receive(new, blank.peer)
        return batch


class Recording:
    """The messages of one rank. Set it as ``METER.tape`` while a pass runs; then ``prepare`` it
    once and ``play`` it any number of times."""

    def __init__(self) -> None:
        self._turns: list[_Posted | int] = []  # a number is a wait for the batch of that turn
        self._open: dict[Pending, int] = {}
        self._sources: dict[_Blank, torch.Tensor] = {}

    def posted(self, post: Callable[[Batch], Pending], batch: Batch, pending: Pending) -> None:
        """Records that ``post`` has begun ``batch``."""
        blanks = tuple(
            _Blank(send, x.shape, x.dtype, x.device, peer) for send, x, peer in batch.operations
        )
        self._open[pending] = len(self._turns)
        self._turns.append(_Posted(post, batch.hop, batch.label, blanks))

    def waited(self, pending: Pending) -> None:
        """Records the wait for ``pending``."""
        self._turns.append(self._open.pop(pending))

    def prepare(self) -> None:
        """Allocates the tensors that ``play`` sends, one for all of the same shape."""
        for turn in self._turns:
            for blank in () if isinstance(turn, int) else turn.operations:
                if blank.send and blank not in self._sources:
                    # Ones, not empty: all pages are mapped.
                    self._sources[blank] = torch.ones(
                        blank.shape, dtype=blank.dtype, device=blank.device
                    )

    def play(self) -> None:
        """Posts and waits as recorded, after ``prepare``; all ranks of the ring play together."""
        assert not self._open, "a batch was never waited for"
        pending: dict[int, Pending] = {}
        for number, turn in enumerate(self._turns):
            if isinstance(turn, int):
                pending.pop(turn).wait()
            else:
                pending[number] = turn.post(turn.batch(self._sources))
