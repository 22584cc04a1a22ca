"""Host time of one call of the op on tiny tensors, where the host is all there is to wait for.

    python experiments/host_time.py [--profile]

Alone: microseconds of a forward call, and of forward + backward. On two gloo ranks: the same beside
a loop without checks, agreement, plans and autograd that posts, computes, merges and waits. Both
run in the same two processes, in turns; medians and best of all turns, the slower rank counts.
``--profile`` also lists where the time of the ring's calls goes, of rank 0.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ringray
from ringray_kernels.merge import merge_

SHAPE = (1, 2, 32, 16)  # batch, heads, rows per rank, head dim
TURNS, CALLS = 150, 5


def microseconds(work: Callable[[], object]) -> float:
    """Returns the mean time of a few calls."""
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    for _ in range(CALLS):
        work()
    return (time.perf_counter() - began) / CALLS * 1e6


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes full attention on the default group: K and V go round, nothing is checked."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out, lse = torch.empty(0), torch.empty(0)
    for step in range(ranks):
        works, coming = [], []
        if step < ranks - 1:
            coming = [torch.empty_like(x) for x in (k, v)]
            after, before = (rank + 1) % ranks, (rank - 1) % ranks
            sends = [dist.P2POp(dist.isend, x, after) for x in (k, v)]
            works = dist.batch_isend_irecv(
                [*sends, *(dist.P2POp(dist.irecv, x, before) for x in coming)]
            )
        part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        if step:
            merge_(out, lse, *part)
        else:
            out, lse = part
        for work in works:
            work.wait()
        if coming:
            k, v = coming
    return out


def contenders() -> dict[str, Callable[[], object]]:
    """Returns what is timed."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.randn(SHAPE)

    def both() -> None:
        ringray.ring_attention(*leaves, causal=False).backward(dout)  # type: ignore[union-attr]

    found: dict[str, Callable[[], object]] = {
        "forward": lambda: ringray.ring_attention(q, k, v, causal=False),
        "causal": lambda: ringray.ring_attention(q, k, v),
        "forward+backward": both,
    }
    if dist.is_initialized():
        found = {"plain": lambda: plain(q, k, v), **found}
    return found


def measured() -> dict[str, tuple[float, float]]:
    """Returns the median and the least of all turns, the slower rank's."""
    timed = contenders()
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(TURNS):
        for name, work in timed.items():
            times[name].append(microseconds(work))
    found = torch.tensor([[statistics.median(each), min(each)] for each in times.values()])
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return {name: (each[0], each[1]) for name, each in zip(timed, found.tolist(), strict=True)}


def show(title: str, found: dict[str, tuple[float, float]]) -> None:
    """Prints times, and their ratios to the plain loop's forward."""
    print(f"{title}: microseconds, median (best)")
    for name, (median, best) in found.items():
        line = f"  {name:17} {median:6.0f} ({best:.0f})"
        if "plain" in found:
            plain_median, plain_best = found["plain"]
            line += f"   {median / plain_median:.2f} ({best / plain_best:.2f}) x plain"
        print(line)


def profiled(name: str) -> None:
    """Prints where the time of one contender goes; all ranks run it."""
    work, profile = contenders()[name], cProfile.Profile()
    for _ in range(CALLS):
        work()
    profile.enable()
    for _ in range(10 * CALLS):
        work()
    profile.disable()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{name}, seconds of {10 * CALLS} calls:")
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def one_rank(rank: int, folder: str, profile: bool) -> None:
    """Runs one of two ranks."""
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found = measured()
    if rank == 0:
        show("two ranks", found)
    if profile:
        for name in ("forward", "forward+backward"):
            profiled(name)
    dist.destroy_process_group()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    profile = parser.parse_args().profile
    torch.set_num_threads(1)
    show("alone", measured())
    if profile:
        for name in ("forward", "forward+backward"):
            profiled(name)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=one_rank, args=(r, folder, profile)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
