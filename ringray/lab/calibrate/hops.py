"""Hops around a ring of ranks, timed on one of them: each rank sends two tensors to the next."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ringray.comm.batch import Batch
from ringray.comm.ring import Comm

_MOST = 32  # hops of one sample
_BYTES = 1 << 22  # of the hops of one sample that are more than one


class HopTimer:
    """The clock of one rank of ``comm``; all ranks call the same methods at the same time."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device

    def sample(self, chunk: Tensor, count: int | None = None) -> tuple[float, float]:
        """Returns the seconds of a hop by the clock, and those of cores: the mean of ``count``
        hops, after one that is not timed. ``chunk``: both tensors."""
        count = count or max(1, min(_MOST, _BYTES // chunk.nbytes))
        self._hop(chunk)
        self._comm.largest([0], "hops")
        began, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            self._hop(chunk)
        cores = (time.process_time() - used) / count
        return (time.perf_counter() - began) / count, cores

    def ends(self, sizes: Sequence[int], seconds: float) -> list[tuple[int, float]]:
        """Returns bytes and seconds of the smallest hop and of a large one, in about ``seconds``.

        ``sizes`` grow until the bytes of a hop take a 16th of that: a slow link sends less, and
        what it lets pass at once, like the bucket of a shaper, is a small part of its sample.
        """
        small = self.chunk(sizes[0])
        least = took = self._slowest(self.sample(small, 1)[0])
        large = small
        first, _ = self.sample(small, max(1, min(_MOST, int(seconds / 16 / least))))
        for size in sizes[1:]:
            large = self.chunk(size)
            took = self._slowest(self.sample(large, 1)[0])
            least = min(least, took)  # the first ones may be late
            if took - least > seconds / 16:  # by its bytes, or only late: a second one tells
                took = min(took, self._slowest(self.sample(large, 1)[0]))
                if took - least > seconds / 16:
                    break
        last, _ = self.sample(large, max(1, min(_MOST, int(seconds / 2 / took))))
        return [(small.nbytes, min(first, least)), (large.nbytes, last)]

    def chunk(self, size: int) -> Tensor:
        """Returns two tensors, of ``size`` bytes together."""
        return torch.ones(2, size // 8, device=self._device)

    def _slowest(self, seconds: float) -> float:
        """Returns the most seconds of any rank, so that all decide alike."""
        return self._comm.largest([round(seconds * 1e9)], "hops")[0] / 1e9

    def _hop(self, chunk: Tensor) -> None:
        rank, ranks = self._comm.rank, self._comm.world_size
        batch = Batch("hop", "chunk")
        for x in chunk:
            batch.send(x, (rank + 1) % ranks)
        for x in torch.empty_like(chunk):  # memory that is new, as in the ring loop
            batch.receive(x, (rank - 1) % ranks)
        self._comm.post(batch).wait()
        if chunk.is_cuda:
            torch.cuda.synchronize(self._device)
