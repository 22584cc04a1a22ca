"""Messages under way: what one rank moved, how long it waited, and when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ringray.instruments.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from ringray.instruments.timeline import Timeline


class Tape(Protocol):
    """Whoever records what is posted and waited for."""

    def posted(self, post: Callable[[Batch], Pending], batch: Batch, pending: Pending) -> None: ...
    def waited(self, pending: Pending) -> None: ...


@dataclass
class Meter:
    """What one rank moved and how long it waited, since the meter was made.

    ``sent_bytes``: payload handed to the network. ``messages``: tensors sent. ``wait_s``: seconds
    the host blocked for messages; on CUDA the device waits instead, which only a timeline sees.
    ``timeline``, ``tape``: where spans and messages are recorded while they are set. ``running``:
    the pass that runs, ``forward`` or ``backward``.
    """

    sent_bytes: int = 0
    messages: int = 0
    wait_s: float = 0.0
    timeline: Timeline | None = None
    tape: Tape | None = None
    running: str = ""

    def snapshot(self) -> Meter:
        """The counts so far."""
        return Meter(self.sent_bytes, self.messages, self.wait_s)

    def since(self, earlier: Meter) -> Meter:
        """What was counted after ``earlier`` was taken."""
        return Meter(
            self.sent_bytes - earlier.sent_bytes,
            self.messages - earlier.messages,
            self.wait_s - earlier.wait_s,
        )


METER = Meter()  # this process: one rank


@dataclass
class Batch:
    """Sends and receives that begin together, in an order that all ranks share. ``hop``: the pass
    and the step at which they do; ``label``: what is moved. Both are for timelines."""

    hop: str = ""
    label: str = ""
    operations: list[tuple[bool, Tensor, int]] = field(default_factory=list)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor to a rank; it must not change until the batch has ended."""
        assert tensor.is_contiguous()
        self.operations.append((True, tensor, to))

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive into a contiguous tensor from a rank."""
        assert tensor.is_contiguous()
        self.operations.append((False, tensor, source))

    @property
    def sent_bytes(self) -> int:
        """Payload that this rank sends."""
        return sum(x.numel() * x.element_size() for is_send, x, _ in self.operations if is_send)

    @property
    def received_bytes(self) -> int:
        """Payload that this rank receives."""
        return sum(x.numel() * x.element_size() for is_send, x, _ in self.operations if not is_send)


class Pending:
    """A posted batch. ``wait`` returns when its tensors may be used (on CUDA: by this stream)."""

    def __init__(self, works: Sequence[dist.Work], batch: Batch) -> None:
        self._works, self._batch = works, batch
        timeline = METER.timeline
        self._flight = timeline.begin() if timeline is not None and batch.operations else None

    def wait(self) -> None:
        """Block until all sends and receives of the batch have ended."""
        if not self._batch.operations:
            return
        if METER.tape is not None:
            METER.tape.waited(self)
        timeline, began = METER.timeline, time.perf_counter()
        stall = timeline.begin() if timeline is not None else None
        HERE.waiting = True
        self._join()
        HERE.waiting = False
        METER.wait_s += time.perf_counter() - began
        if timeline is not None and stall is not None and self._flight is not None:
            batch = self._batch
            about = batch.hop, batch.label
            timeline.end("wait", *about, stall)
            timeline.end("transfer", *about, self._flight, batch.sent_bytes, batch.received_bytes)
        self._batch = Batch()

    def _join(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()
