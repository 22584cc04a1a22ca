"""One rank that measures: ``python -m ringray.lab.calibrate.rank JSON`` prints its samples as JSON.

Attention is called as the ring loop calls it, messages go through the class that rings use. On a
CPU the time of a call is that of its thread, which other processes do not lengthen as they do the
clock's.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringray.comm.ring import connect
from ringray.lab.calibrate.hops import HopTimer
from ringray.lab.calibrate.machine import TimedCall
from ringray.lab.kinds import latency
from ringray.lab.kinds.base import RankContext, ring_pass
from ringray.lab.trial.config import TrialConfig
from ringray_kernels import api
from ringray_kernels.dtypes import torch_dtype

_SAMPLE_S = 5e-3  # of repeated calls
_LONG_S = 0.25  # of a call that needs two samples only
# Rows and columns of products, the second for types whose first is fast; bytes of a copy, more than
# caches hold.
_PRODUCTS = {"cpu": (256, 2048), "cuda": (256, 8192)}
_COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}
_PATIENCE = timedelta(seconds=60)


class RankTask(NamedTuple):
    """The work of one rank."""

    parts: dict[str, float]  # methods of ``RankMeasurer``, and about as many seconds as each takes
    rank: int
    ranks: int
    store: str  # the file through which ranks meet
    device: str
    cases: tuple[TimedCall, ...]
    sizes: tuple[int, ...]  # bytes of hops
    rings: tuple[dict[str, Any], ...]  # configurations of trials


class RankMeasurer:
    """One rank with its device, its ring and its clock. Each part returns lists of seconds."""

    def __init__(self, task: RankTask) -> None:
        self._task, self._cuda = task, task.device == "cuda"
        self._device = torch.device("cuda", task.rank) if self._cuda else torch.device("cpu")
        if self._cuda:
            torch.cuda.set_device(self._device)
        torch.set_num_threads(1)
        if task.ranks > 1:
            place, backend = f"file://{task.store}", "nccl" if self._cuda else "gloo"
            init = partial(dist.init_process_group, backend, init_method=place)
            init(rank=task.rank, world_size=task.ranks, timeout=_PATIENCE)
        self._comm = connect(None)

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        of_thread = not self._cuda and torch.get_num_threads() == 1
        return time.thread_time() if of_thread else time.perf_counter()

    def _sample(self, work: Callable[[], object]) -> float:
        """Returns the seconds of one call, the mean of some; those before warm up."""
        calls = 1
        if self._cuda:
            work()  # compiles
        while True:
            began = self._now()
            for _ in range(calls):
                work()
            if (passed := self._now() - began) >= _SAMPLE_S:
                return passed / calls
            calls = max(2 * calls, int(1.2 * calls * _SAMPLE_S / max(passed, _SAMPLE_S / 100)))

    def _rounds(self, part: str, least: int = 3) -> Iterator[int]:
        """Yields numbers until the time of a part is over, on all ranks as often."""
        ends, done = time.perf_counter() + self._task.parts[part], 0
        while self._comm.largest([done < least or time.perf_counter() < ends], "round")[0]:
            yield done
            done += 1

    def _attention(self, case: TimedCall) -> float:
        torch.set_num_threads(case.threads)
        try:
            return self._sample(attention_call(case, self._device))
        finally:
            torch.set_num_threads(1)

    def attention(self) -> list[list[float]]:
        """Times the calls in turn; long ones less often."""
        samples: list[list[float]] = [[] for _ in self._task.cases]
        for turn in self._rounds("attention"):
            for case, taken in zip(self._task.cases, samples, strict=True):
                if turn < 2 or taken[-1] < _LONG_S:
                    taken.append(self._attention(case))
        return samples

    def shared(self) -> dict[str, list[list[float]]]:
        """Times the calls on rank 0 while the others wait, and on all ranks at once."""
        samples: dict[str, list[list[float]]] = {"alone": [], "busy": []}
        for _ in self._rounds("shared"):
            for kind, taken in samples.items():
                measures = kind == "busy" or self._task.rank == 0
                taken.append([self._attention(case) for case in self._task.cases if measures])
                self._comm.largest([0], kind)
        return samples

    def products(self) -> dict[str, list[float]]:
        """Times products of matrices by dtype, and a large copy: FLOP/s and bytes/s. Of a GPU also
        the bytes of its memory."""
        size = _COPIED[self._device.type]
        source = torch.ones(size, dtype=torch.uint8, device=self._device)
        into, rates = torch.empty_like(source), dict[str, list[float]]()
        if self._cuda:
            memory = torch.cuda.get_device_properties(self._device).total_memory
            rates["memory"] = [float(memory)]
        for _ in self._rounds("products"):
            for name in dict.fromkeys(case.dtype for case in self._task.cases):
                rates.setdefault(name, []).append(self._product(torch_dtype(name)))
            copied = self._sample(lambda: into.copy_(source))
            rates.setdefault("copy", []).append(2.0 * size / copied)
        return rates

    def _product(self, dtype: torch.dtype) -> float:
        rate = 0.0
        for rows in _PRODUCTS[self._device.type]:
            x = torch.randn(rows, rows, device=self._device).to(dtype)
            seconds = self._sample(lambda x=x: x @ x)  # type: ignore[misc]
            rate = 2.0 * rows**3 / seconds
            if seconds > _SAMPLE_S:
                break
        return rate

    def hops(self) -> dict[str, list[list[float]]]:
        """Times hops around the ring: each rank sends two tensors to the next."""
        timer = HopTimer(self._comm, self._device)
        chunks = list(map(timer.chunk, self._task.sizes))
        return self._clocked("hops", 3, lambda: map(timer.sample, chunks))

    def rings(self) -> dict[str, list[list[float]]]:
        """Times both passes of whole rings."""
        context = RankContext(self._task.rank, self._device, dist.group.WORLD)
        configs = [TrialConfig.from_dict(ring) for ring in self._task.rings]
        rings = [(config, latency.shards(config, context)) for config in configs]
        samples = self._clocked("rings", 5, lambda: (self._ring(*ring, context) for ring in rings))
        return {kind: rounds[1:] for kind, rounds in samples.items()}  # the first one warms up

    def _clocked(
        self, part: str, least: int, sample: Callable[[], Iterable[tuple[float, float]]]
    ) -> dict[str, list[list[float]]]:
        """Takes samples by the clock and in seconds of cores, in at least ``least`` rounds."""
        samples: dict[str, list[list[float]]] = {"clock": [], "cores": []}
        for _ in self._rounds(part, least):
            for kind, seconds in zip(samples, zip(*sample(), strict=True), strict=True):
                samples[kind].append(list(seconds))
        return samples

    def _ring(
        self, config: TrialConfig, inputs: latency.Inputs, context: RankContext
    ) -> tuple[float, float]:
        self._comm.largest([0], "rings")
        began, used = time.perf_counter(), time.process_time()
        ring_pass(config, context, *inputs)
        self._now()
        return time.perf_counter() - began, time.process_time() - used


@lru_cache(maxsize=1)
def _tensors(
    dtype: str, head_dim: int, rows: int, heads: int, device: torch.device
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Returns q, k, v and dout, three sums in fp32, and an lse that is no less than theirs."""
    shape = (1, heads, rows, head_dim)
    inputs = [torch.randn(shape, device=device).to(torch_dtype(dtype)) for _ in range(4)]
    sums = [torch.zeros(shape, device=device) for _ in range(3)]
    return inputs, sums, torch.full(shape[:3], math.log(rows) + 8, device=device)


def ends(shape: str, rows: int) -> np.ndarray[Any, Any]:
    """Returns how many keys each row sees; ``stepped``: each second row sees two more."""
    causal = np.arange(rows) + 1
    return {"causal": causal, "full": np.full(rows, rows), "stepped": causal // 2 * 2}[shape]


def attention_call(case: TimedCall, device: torch.device) -> Callable[[], object]:
    """Returns a function that computes one call of attention."""
    dtype, head_dim, direction, shape, rows, heads, _ = case
    (q, k, v, dout), sums, lse = _tensors(dtype, head_dim, rows, heads, device)
    end = torch.from_numpy(ends(shape, rows)).int().to(device)[None]
    scale, start = head_dim**-0.5, torch.zeros_like(end)
    if direction == "backward":
        dq, dk, dv = sums
        return lambda: api.backward(
            dout, q, k, v, lse, lse, start, end, scale=scale, dq=dq, dk=dk, dv=dv, out=dout
        )
    state = None if shape == "causal" else api.State(sums[0], lse.clone())
    return lambda: api.forward(q, k, v, start, end, scale=scale, state=state)


def main() -> None:
    """Measures what the argument asks for, and prints the samples."""
    fields = json.loads(sys.argv[1])
    os.environ["RINGRAY_TUNED"] = "0"
    cases = tuple(TimedCall(*case) for case in fields["cases"])
    measurer = RankMeasurer(RankTask(**fields | {"cases": cases}))
    print(json.dumps({part: getattr(measurer, part)() for part in fields["parts"]}))
    with suppress(Exception):  # the others may have ended
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
