"""Messages under way, and the bytes and waiting times of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringray.base.errors import settle
from ringray.instruments.progress import HERE
from ringray.instruments.timeline import Timeline


class Tape(Protocol):
    """A recorder of posted batches and of waiting for them."""

    def posted(self, post: Callable[[Batch], Pending], batch: Batch, pending: Pending) -> None: ...
    def waited(self, pending: Pending) -> None: ...


@dataclass
class Meter:
    """Traffic and waiting time of one rank since the meter was made.

    ``sent_bytes``: payload handed to the network. ``messages``: tensors sent. ``wait_s``: seconds
    for which the host blocked for messages; on CUDA the device waits instead, which only a timeline
    shows. ``timeline``, ``tape``: recorders of spans and messages, if set. ``running``: the current
    pass, ``forward`` or ``backward``.
    """

    sent_bytes: int = 0
    messages: int = 0
    wait_s: float = 0.0
    timeline: Timeline | None = None
    tape: Tape | None = None
    running: str = ""

    def snapshot(self) -> Meter:
        """Returns the counts so far."""
        return Meter(self.sent_bytes, self.messages, self.wait_s)

    def since(self, earlier: Meter) -> Meter:
        """Returns the counts since ``earlier`` was taken."""
        return Meter(
            self.sent_bytes - earlier.sent_bytes,
            self.messages - earlier.messages,
            self.wait_s - earlier.wait_s,
        )


METER = Meter()  # this process: one rank


class WaitScope:
    """A wait for other ranks, marked in this one's progress; its error names ``hop``, this rank and
    a way out."""

    __slots__ = ("_hop",)

    def __init__(self, hop: str) -> None:
        self._hop = hop

    def __enter__(self) -> None:
        HERE.waiting = True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            HERE.waiting = False  # the mark stays if the wait fails
            return
        settle(error)  # others wait for messages, too
        # Of torch, too, but this rank's own.
        own = isinstance(error, torch.OutOfMemoryError | NotImplementedError)
        if isinstance(error, RuntimeError) and not own:
            hop, rank = self._hop, dist.get_rank() if dist.is_initialized() else 0
            hint = "another rank has failed, or did not get here: every rank must make the same "
            hint += "calls, and run their backward passes, in the same order"
            raise type(error)(f"rank {rank}, {hop}: {error}; {hint}") from error


@dataclass
class Batch:
    """Sends and receives that begin together, in an order that all ranks share. For timelines,
    ``hop`` is the pass and the step at which they begin, and ``label`` names the moved rows."""

    hop: str = ""
    label: str = ""
    operations: list[tuple[bool, Tensor, int]] = field(default_factory=list)

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends a contiguous tensor to a rank; it must not change until the batch has ended."""
        assert tensor.is_contiguous()
        self.operations.append((True, tensor, to))

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receives into a contiguous tensor from a rank."""
        assert tensor.is_contiguous()
        self.operations.append((False, tensor, source))

    def by_peer(self) -> dict[tuple[bool, int], list[Tensor]]:
        """Returns the tensors to receive (False) from each rank, then those to send (True) to each;
        both ends list them in the same order.

        On one connection with gloo, word that a rank is ready to receive waits behind what it
        sends, and both directions would take turns.
        """
        tensors: dict[tuple[bool, int], list[Tensor]] = {}
        for is_send, tensor, peer in sorted(self.operations, key=lambda operation: operation[0]):
            tensors.setdefault((is_send, peer), []).append(tensor)
        return tensors

    def payload(self, *, sent: bool) -> int:
        """Returns the bytes that this rank sends, or receives."""
        return sum(x.nbytes for is_send, x, _ in self.operations if is_send == sent)


class Packed:
    """Small tensors for one peer as one message. ``filled``: with what the tensors hold."""

    def __init__(self, tensors: Sequence[Tensor], *, filled: bool) -> None:
        self._parts = [x.view(-1).view(torch.uint8) for x in tensors]
        if filled:
            self.buffer = torch.cat(self._parts)
        else:
            self.buffer = self._parts[0].new_empty(sum(x.numel() for x in self._parts))

    def wait(self) -> None:
        """Fills the tensors with what has arrived."""
        arrived = self.buffer.split([x.numel() for x in self._parts])
        for part, received in zip(self._parts, arrived, strict=True):
            part.copy_(received)


class Pending:
    """A posted batch. After ``wait`` its tensors may be used (on CUDA by the current stream)."""

    def __init__(self, works: Sequence[dist.Work], batch: Batch) -> None:
        self._works, self._batch = works, batch
        timeline = METER.timeline
        self._flight = timeline.begin() if timeline is not None and batch.operations else None

    def wait(self) -> None:
        """Blocks until all sends and receives of the batch have ended."""
        if not self._batch.operations:
            return
        if METER.tape is not None:
            METER.tape.waited(self)
        timeline, began = METER.timeline, time.perf_counter()
        stall = timeline.begin() if timeline is not None else None
        with WaitScope(f"{self._batch.hop}, {self._batch.label}"):
            self._join()
        METER.wait_s += time.perf_counter() - began
        if timeline is not None and stall is not None and self._flight is not None:
            batch = self._batch
            about = batch.hop, batch.label
            timeline.end("wait", *about, stall)
            moved = batch.payload(sent=True), batch.payload(sent=False)
            timeline.end("transfer", *about, self._flight, *moved)
        self._batch = Batch()

    def _join(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()
