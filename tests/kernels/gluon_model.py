"""A model of Gluon on a CPU, good enough to run ``hopper*.py`` as they stand.

Gluon has no interpreter. Here its source is executed with stand-ins: each partition of
``warp_specialize`` is a thread, shared memory is numpy, a barrier counts arrivals and bytes as the
hardware does, and an asynchronous product is computed when it is *waited for*: an operand that is
overwritten too early gives a wrong result, a barrier that nobody completes a timeout.
"""

from __future__ import annotations

import ast
import operator
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ringray_kernels.backends import triton as package
from ringray_kernels.backends.triton.plan import COLUMNS, tile_plan

PATIENCE_S = 300.0
FLOOR, LOG2_E, LN_2 = -1.0e30, 1.4426950408889634, 0.6931471805599453


class Number(int):
    """An integer that can be cast, as can the results of its arithmetic."""

    def to(self, dtype: Any) -> Number:
        return self


def _closed(name: str) -> Any:
    function = getattr(operator, name)

    def method(self: int, other: Any) -> Any:
        result = function(int(self), other)
        return Number(result) if isinstance(result, int) else result

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Number, f"__{_name}__", _closed(_name))


class Array(np.ndarray):
    """A tensor: numpy with casts."""

    def to(self, dtype: Any) -> Array:
        return self.astype(np.float16).astype(np.float32).view(Array) if dtype == "half" else self


def array(x: Any) -> Array:
    return np.asarray(x).view(Array)


class Pointer:
    """Into a flat numpy array, at an offset or many."""

    def __init__(self, data: np.ndarray, offset: Any = 0) -> None:
        self.data, self.offset = data, offset
        self.dtype = SimpleNamespace(element_ty="float")

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.data, self.offset + np.asarray(more))


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def index(self, i: Any) -> Any:
        part = self.data[int(i)]
        return part if isinstance(part, Barrier) else Shared(part)

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.transpose(order))

    def load(self, layout: Any) -> Array:
        return array(self.data.copy())

    def store(self, value: np.ndarray) -> None:
        self.data[...] = value


class Barrier:
    """An mbarrier: a phase completes when ``count`` arrivals and all expected bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase = self.count = self.pending = self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        with self.changed:
            self.pending -= count
            self.bytes += expected
            assert self.pending >= 0, "more arrivals than the barrier was made for"
            self._complete()

    def deliver(self, size: int) -> None:
        with self.changed:
            self.bytes -= size
            self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            # The phase of this parity is over when the one under way has the other parity.
            done = self.changed.wait_for(lambda: self.phase & 1 != int(parity) & 1, PATIENCE_S)
        assert done, "a barrier that nobody completes"


class Product:
    """An asynchronous product: computed when it is waited for."""

    under_way = threading.local()  # the products of each thread, in order of issue

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.under_way.all = [*getattr(self.under_way, "all", ()), self]

    def result(self) -> Array:
        assert self not in self.under_way.all, "a product that is still under way"
        a = self.a.data if isinstance(self.a, Shared) else self.a
        start = self.acc if self.use_acc else 0.0
        return array(a.astype(np.float32) @ self.b.data.astype(np.float32) + start)


class Descriptor:
    """A tensor descriptor of (1, 1, rows, D) blocks; zeros beyond the end."""

    layout = None
    dtype = "half"

    def __init__(self, x: np.ndarray, rows: int) -> None:
        self.x, self.rows = x, rows

    def block(self, batch: int, head: int, row: int) -> np.ndarray:
        part = self.x[batch, head, max(row, 0) : row + self.rows]
        block = np.zeros((self.rows, self.x.shape[-1]), self.x.dtype)
        block[: len(part)] = part
        return block


def _async_load(tiles: Descriptor, at: list[int], bar: Any, into: Shared, pred: Any = True) -> None:
    if pred:
        block = tiles.block(*(int(i) for i in at[:3]))
        into.data[...] = block.reshape(into.data.shape)
        _one(bar).deliver(block.size * 2)


def _one(bar: Any) -> Barrier:
    barrier = bar if isinstance(bar, Barrier) else bar.data[0]
    assert isinstance(barrier, Barrier)
    return barrier


def _wait(pending: int = 0, deps: Any = ()) -> Any:
    """The oldest products are complete, all but ``pending``."""
    issued = getattr(Product.under_way, "all", [])
    Product.under_way.all = issued[len(issued) - pending :] if pending else []
    results = [x.result() if isinstance(x, Product) else x for x in deps]
    return results[0] if len(results) == 1 else tuple(results)


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Any:
    flat, at = pointer.data.reshape(-1), np.asarray(pointer.offset)
    if at.ndim == 0:
        return Number(flat[at])
    if mask is None:
        return array(flat[at])
    mask = np.broadcast_to(mask, at.shape)
    return array(np.where(mask, flat[np.where(mask, at, 0)], other))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    flat = pointer.data.reshape(-1)
    where = np.broadcast_to(mask, np.shape(pointer.offset))
    flat[pointer.offset[where]] = np.broadcast_to(value, where.shape)[where]


def _allocate(dtype: str, shape: list[int], layout: Any) -> Shared:
    if dtype == "barrier":
        barriers = np.empty(shape[0], object)
        for i in range(shape[0]):
            barriers[i] = Barrier()
        return Shared(barriers)
    return Shared(np.full(shape, np.nan, np.float32 if dtype == "float" else np.float16))


def _specialise(partitions: Any, warps: Any, registers: Any) -> None:
    errors: list[BaseException] = []

    def guarded(function: Any, arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=part) for part in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def load_kernels(replace: dict[str, str] | None = None) -> dict[str, Any]:
    """The names of ``hopper*.py``, executed with stand-ins; ``replace`` changes source text."""
    paths = [
        Path(str(package.__file__)).with_name(f"hopper{part}.py")
        for part in ("", "_forward", "_dkv", "_dq")
    ]
    text = "\n".join(path.read_text() for path in paths)
    for old, new in (replace or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    grid = SimpleNamespace(at=())

    def jit(function: Any = None, **options: Any) -> Any:
        return function if callable(function) else (lambda f: f)

    gl = SimpleNamespace(
        constexpr=lambda x: x, where=lambda c, a, b: array(np.where(c, a, b)),
        maximum=lambda a, b: array(np.maximum(a, b)), minimum=lambda a, b: array(np.minimum(a, b)),
        max=lambda x, axis: array(x.max(axis)), sum=lambda x, axis: array(x.sum(axis)),
        exp2=lambda x: array(np.exp2(x)), log2=lambda x: array(np.log2(x)),
        zeros=lambda shape, *_: array(np.zeros(shape, np.float32)),
        full=lambda shape, value, *_: array(np.full(shape, value, np.float32)),
        arange=lambda a, b, *_: array(np.arange(a, b)),
        expand_dims=lambda x, axis: array(np.expand_dims(x, axis)),
        convert_layout=lambda x, layout: x, load=_load, store=_store, static_range=range,
        allocate_shared_memory=_allocate, warp_specialize=_specialise, float32="float",
        int64="barrier", program_id=lambda axis: grid.at[axis],
        **dict.fromkeys(
            (
                "NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "DotOperandLayout",
                "DistributedLinearLayout", "SwizzledSharedLayout",
            ),
            lambda *_, **named: None,
        ),
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda bar, count: _one(bar).init(count),
        arrive=lambda bar, count, pred=True: _one(bar).arrive(count) if pred else None,
        expect=lambda bar, size, pred=True: _one(bar).arrive(1, size) if pred else None,
        wait=lambda bar, phase, pred=True: _one(bar).wait(phase) if pred else None,
    )
    names: dict[str, Any] = {
        "gluon": SimpleNamespace(jit=jit),
        "gl": gl,
        "mbarrier": mbarrier,
        "tma": SimpleNamespace(async_load=_async_load),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=False: Product(
            a, b, acc, use_acc
        ),
        "warpgroup_mma_wait": _wait,
        "warpgroup_mma_init": lambda x: x,
        "COLUMNS": COLUMNS,
        "tiles": SimpleNamespace(FLOOR=FLOOR, LOG2_E=LOG2_E, LN_2=LN_2),
    }
    exec(compile(tree, "hopper", "exec"), names)
    names |= {"grid": grid, "hopper": SimpleNamespace(**names)}  # all files share their names
    return names


def run_forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, start: np.ndarray, end: np.ndarray, scale: float,
    state: tuple[np.ndarray, np.ndarray] | None, block_n: int, stages: int,
    replace: dict[str, str] | None = None, last: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(out, lse) of the kernel; q, k, v (B, H, S, D) fp16, the state as in the public function;
    ``last``: it is read and not written, as where the input's dtype is asked for."""
    names = load_kernels(replace)
    batch, heads, rows, width = q.shape
    in_place = state is not None and not last
    blank = (np.full(q.shape, np.nan, np.float32), np.full(q.shape[:3], np.nan, np.float32))
    out, lse = state if in_place else blank
    earlier = state or (out, lse)
    plan, blocks = _planned(start, end, block_n)
    copies = heads * batch // start.shape[0]
    for _ in _programs(names, blocks * copies):
        names["hopper_forward_kernel"](
            Descriptor(q, 64), Descriptor(k, block_n), Descriptor(v, block_n), Pointer(plan),
            Pointer(start), Pointer(end), Pointer(out), Pointer(lse), *map(Pointer, earlier),
            np.float32(scale * LOG2_E), copies, heads, rows, heads // k.shape[1], width, block_n,
            stages, state is not None, in_place,
        )  # fmt: skip
    return out, lse


def _planned(start: np.ndarray, end: np.ndarray, tile: int) -> tuple[np.ndarray, int]:
    """The plan of blocks of 128 rows, and their number."""
    plan = tile_plan(torch.from_numpy(start), torch.from_numpy(end), 128, tile).numpy()
    return plan, len(plan) - 1


def _programs(names: dict[str, Any], programs: int) -> Iterator[None]:
    """Each program of the grid in turn."""
    for at in range(programs):
        names["grid"].at = (Number(at),)
        yield


def run_dkv(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, lse: np.ndarray,
    delta: np.ndarray, first: np.ndarray, stop: np.ndarray, dk: np.ndarray, dv: np.ndarray,
    scale: float, block_m: int, stages: int, replace: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """The kernel adds to dk and dv; ``first`` and ``stop`` are the inverse intervals."""
    names = load_kernels(replace)
    batch, kv_heads, keys, width = k.shape
    strides = (kv_heads * keys * width, keys * width, width)
    plan, blocks = _planned(first, stop, block_m)
    copies = kv_heads * batch // first.shape[0]
    for _ in _programs(names, blocks * copies):
        names["hopper_dkv_kernel"](
            Descriptor(q, block_m), Descriptor(dout, block_m), Descriptor(k, 64),
            Descriptor(v, 64), Pointer(plan), Pointer(first), Pointer(stop), Pointer(lse),
            Pointer(delta), Pointer(dk), Pointer(dv), np.float32(scale),
            np.float32(scale * LOG2_E), *strides, *strides, copies, kv_heads, q.shape[2], keys,
            q.shape[1] // kv_heads, width, block_m, stages,
        )  # fmt: skip


def run_dq(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, lse: np.ndarray,
    delta: np.ndarray, start: np.ndarray, end: np.ndarray, dq: np.ndarray, scale: float,
    block_n: int, stages: int, replace: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """The kernel adds to dq."""
    names = load_kernels(replace)
    batch, heads, rows, width = q.shape
    plan, blocks = _planned(start, end, block_n)
    copies = heads * batch // start.shape[0]
    for _ in _programs(names, blocks * copies):
        names["hopper_dq_kernel"](
            Descriptor(q, 64), Descriptor(dout, 64), Descriptor(k, block_n),
            Descriptor(v, block_n), Pointer(plan), Pointer(start), Pointer(end), Pointer(lse),
            Pointer(delta), Pointer(dq), np.float32(scale), np.float32(scale * LOG2_E), copies,
            heads, rows, heads // k.shape[1], width, block_n, stages,
        )  # fmt: skip
