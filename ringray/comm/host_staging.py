"""Messages through host memory, for process groups that cannot access device memory.

While the caller computes, one thread per process copies outgoing tensors to the host (pinned, if
there is a GPU), exchanges messages, and copies incoming tensors to the device. Batches begin in the
order in which they were posted, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache

import torch
import torch.distributed as dist

from ringray.comm.batch import Batch, Pending


@lru_cache(maxsize=1)
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="ringray-staging")


@lru_cache(maxsize=8)
def _copies(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all copies to and from a GPU, with priority over computation."""
    return torch.cuda.Stream(device, priority=-1)


class Staged(Pending):
    """A batch that a thread copies, sends and receives."""

    def __init__(self, done: Future[torch.cuda.Event | None], batch: Batch) -> None:
        super().__init__((), batch)
        self._done, self._device = done, batch.operations[0][1].device

    def _join(self) -> None:
        arrived = self._done.result()
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)


def post(batch: Batch, start: Callable[[Batch], Sequence[dist.Work]]) -> Pending:
    """Begins a batch; ``start`` begins one whose tensors are on the host."""
    device = batch.operations[0][1].device
    ready = None
    if device.type == "cuda":  # sent tensors are computed by then, and receiving ones are free
        ready = torch.cuda.current_stream(device).record_event()
    return Staged(_thread().submit(_move, batch, start, device, ready), batch)


def _move(
    batch: Batch,
    start: Callable[[Batch], Sequence[dist.Work]],
    device: torch.device,
    ready: torch.cuda.Event | None,
) -> torch.cuda.Event | None:
    stream = None if ready is None else _copies(device)
    # A stream of None would wake the driver on a machine with GPUs.
    copying = nullcontext() if stream is None else torch.cuda.stream(stream)
    with copying:
        if ready is not None:
            ready.wait()
        hosted = _to_host(batch, pinned=stream is not None)
    if stream is not None:
        stream.synchronize()  # this thread's copies only: the caller's stream goes on
    for work in start(hosted):
        work.wait()
    with copying:
        _to_device(batch, hosted)
        return None if stream is None else stream.record_event()


def _to_host(batch: Batch, *, pinned: bool) -> Batch:
    hosted = Batch()
    for is_send, tensor, peer in batch.operations:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        if is_send:
            copy.copy_(tensor, non_blocking=True)
            hosted.send(copy, peer)
        else:
            hosted.receive(copy, peer)
    return hosted


def _to_device(batch: Batch, hosted: Batch) -> None:
    for (is_send, tensor, _), (_, copy, _) in zip(batch.operations, hosted.operations, strict=True):
        if not is_send:
            tensor.copy_(copy, non_blocking=True)
