"""Real rings for tests: processes in a gloo group, and one call of the op on them.

A process takes seconds to import torch, so the processes are forked from one that has done so, and
are kept from one ring to the next; each ring is a process group of its own. A check is a function
``(rank, size)``; whatever it raises fails the test that started the ring.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ringray
from ringray.partition import BALANCED, Partitioning
from ringray_kernels import Blocks, testing
from tests.support.backend_problems import DROPOUT_SEED

Check = Callable[[int, int], None]

NAN = float("nan")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
KEPT = 4  # processes that wait for the next ring
# How long a group waits that is meant to wait in vain: longer than a busy machine keeps a rank.
SHORT = timedelta(seconds=6)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # sizes are tiny, and threads only wait when the machine is busy
    "KINETO_LOG_LEVEL": "5",  # the profiler reports its own start
}
# Modules that take a second or more of every process, if this one has imported them.
PRELOADED = ("torch", "torch._dynamo", "transformers.modeling_utils")


class Worker(NamedTuple):
    """A process that is a rank of one ring after another."""

    process: ForkServerProcess
    connection: Connection[Any, Any]


_workers: list[Worker] = []


def on_ring(size: int, checks: Sequence[Check]) -> None:
    """Runs the checks on every rank of a ring of ``size`` processes."""
    while len(_workers) < size:
        _workers.append(_started())
    try:
        with tempfile.TemporaryDirectory() as folder:
            for rank, worker in enumerate(_workers[:size]):
                worker.connection.send((rank, size, folder, tuple(checks)))
            waiting = {worker.connection for worker in _workers[:size]}
            while waiting:
                for answered in wait(list(waiting)):
                    failure = answered.recv()  # EOFError where the process has died
                    if failure is not None:
                        raise AssertionError(failure)
                    waiting.remove(answered)
    except BaseException:
        _end(0)  # the other ranks may wait for one that has failed
        raise
    _end(KEPT)


def _started() -> Worker:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in PRELOADED if name in sys.modules])
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        process = context.Process(target=_work, args=(theirs,))
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    theirs.close()
    return Worker(process, ours)


def _end(kept: int) -> None:
    """Ends all processes but the first ``kept``."""
    for worker in _workers[kept:]:
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
    del _workers[kept:]


atexit.register(_end, 0)  # before multiprocessing waits for them, which it was told to earlier


def _work(connection: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            rank, size, folder, checks = connection.recv()
        except EOFError:  # the tests have ended
            return
        _as_new()
        try:
            _rank(rank, size, folder, checks)
        except Exception:
            connection.send(traceback.format_exc())
            return
        connection.send(None)


def _as_new() -> None:
    """Undoes what earlier rings may have left: every rank draws the same numbers again."""
    random.seed(0)
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._dynamo").reset()
    if "torch.distributed.tensor" in sys.modules:  # it keeps meshes, whose groups have ended
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    gc.collect()


def _rank(rank: int, size: int, folder: str, checks: tuple[Check, ...]) -> None:
    dist.init_process_group(
        "gloo", init_method=(Path(folder) / "store").as_uri(), rank=rank, world_size=size,
        timeout=timedelta(seconds=1200),
    )  # fmt: skip
    try:
        for check in checks:
            try:
                check(rank, size)
            except Exception as error:
                raise AssertionError(
                    f"{_name(check)} on rank {rank} of {size}:\n{traceback.format_exc()}"
                ) from error
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _name(check: Check) -> str:
    return repr(check) if isinstance(check, partial) else getattr(check, "__name__", repr(check))


def dealt(
    partition: str, seq_len: int, group: dist.ProcessGroup | None = None, **mask: Any
) -> Partitioning:
    """The partition of a ring; balanced for a mask."""
    if partition != BALANCED:
        return partition
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    return ringray.deal(seq_len, ranks, **mask)


@dataclass(frozen=True)
class Case:
    """One call of the op. ``cu`` are document boundaries."""

    partition: str
    dtype: torch.dtype = torch.float32
    seq_len: int = 61
    causal: bool = True
    window: int | tuple[int | None, int | None] | None = None
    cu: tuple[int, ...] | None = None
    backend: str = "aten"
    batch: int = 1
    seed: int = 0
    blocks: Blocks | int | None = None
    head_dim: int = HEAD_DIM
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    transport: str = "ring"
    backward: str = "auto"
    scale: float | None = None
    with_dlse: bool = False
    uneven: bool = False  # rows of dout from tiny to huge
    chunk: int | None = None
    prefix: int | tuple[int, ...] | None = None
    with_sinks: bool = False
    softcap: float | None = None
    value_dim: int | None = None
    global_tokens: int | None = None
    alibi: bool = False
    dropout_p: float = 0.0
    reach: int | None = None  # of learned biases
    shared_prefix: int | None = None

    @property
    def dealt(self) -> Partitioning:
        """The partition of this ring; balanced for the mask of the call."""
        return dealt(self.partition, self.seq_len, **self.mask)

    @property
    def factor(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def dlse(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        dlse = torch.randn(self.batch, self.heads, self.seq_len, generator=generator)
        # Of a row's own size: both are terms of one fp32 sum, where the smaller one is lost.
        return dlse * self.sizes[:, 0] if self.uneven else dlse

    @property
    def sinks(self) -> Tensor | None:
        return testing.make_sinks(self.heads, seed=self.seed) if self.with_sinks else None

    @property
    def scoring(self) -> dict[str, Any]:
        """The parts of the softmax beside products of q and k."""
        dropped = testing.dropout_factors(self.inputs[0], self.dropout_p, DROPOUT_SEED)
        return {
            "softcap": self.softcap, "sinks": self.sinks, "slopes": self.slopes,
            "factors": dropped, "table": self.table,
        }  # fmt: skip

    @property
    def table(self) -> Tensor | None:
        if self.reach is None:
            return None
        return testing.make_table(self.heads, self.reach, seed=self.seed)

    @property
    def slopes(self) -> Tensor | None:
        return testing.make_slopes(self.heads) if self.alibi else None

    @property
    def sizes(self) -> Tensor:
        """Of the rows of uneven gradients."""
        generator = torch.Generator().manual_seed(self.seed)
        reach = 4 if self.dtype == torch.float16 else 25
        return 10 ** ((torch.rand(self.seq_len, 1, generator=generator) - 0.6) * reach)

    @property
    def mask(self) -> dict[str, Any]:
        return {
            "causal": self.causal, "window": self.window, "chunk": self.chunk,
            "prefix": self.prefix, "global_tokens": self.global_tokens,
            "shared_prefix": self.shared_prefix,
            "cu_seqlens": None if self.cu is None else torch.tensor(self.cu),
        }  # fmt: skip

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "partition": self.dealt, **self.mask, "seq_len": self.seq_len,
            "backend": self.backend, "blocks": self.blocks, "transport": self.transport,
            "backward": self.backward, "scale": self.scale, "softcap": self.softcap,
            "alibi_slopes": self.slopes,
            "dropout_p": self.dropout_p,
            "dropout_seed": DROPOUT_SEED if self.dropout_p else None,
        }  # fmt: skip

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, dout = testing.make_inputs(
            self.batch, self.heads, self.kv_heads, self.seq_len, self.head_dim, self.dtype,
            seed=self.seed, value_dim=self.value_dim,
        )  # fmt: skip
        if self.uneven:
            dout = (dout.float() * self.sizes).to(self.dtype)
        return q, k, v, dout

    def shards(self, pad_value: float = NAN) -> list[Tensor]:
        """This rank's q, k, v, dout."""
        return [
            ringray.shard(x, dim=2, partition=self.dealt, pad_value=pad_value) for x in self.inputs
        ]

    def run(self, pad_value: float = NAN) -> dict[str, Tensor]:
        """out, lse and gradients of this rank's shard; padding holds ``pad_value``."""
        *qkv, dout = self.shards(pad_value)
        q, k, v = (x.requires_grad_() for x in qkv)
        sinks = None if self.sinks is None else self.sinks.requires_grad_()
        table = None if self.table is None else self.table.requires_grad_()
        more = self.arguments | {"sinks": sinks, "distance_bias": table}
        out, lse = ringray.ring_attention(q, k, v, return_lse=True, **more)
        if self.with_dlse:
            dlse = ringray.shard(self.dlse, dim=2, partition=self.dealt, pad_value=pad_value)
            torch.autograd.backward((out, lse), (dout, dlse))
        else:
            out.backward(dout)
        assert (out.dtype, q.grad.dtype, lse.dtype) == (self.dtype, self.dtype, torch.float32)
        found = {"out": out.detach(), "lse": lse.detach()}
        found |= {"dq": q.grad, "dk": k.grad, "dv": v.grad}
        for name, x in (("dsinks", sinks), ("dtable", table)):
            if x is not None:
                found[name] = x.grad
        return found
