"""The cases of the benchmark: points, their exact FLOPs, and inputs larger than the cache.

Shapes: q, dout (1, H, S, D), k, v (1, Hkv, S, D), contiguous, standard normal values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ringray_kernels.dtypes import DTYPES, torch_dtype
from ringray_kernels.intervals import visible_range

MaskName = Literal["full", "causal", "window", "documents"]
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Which = Literal["quick", "all"]
Form = Literal["plain", "strided", "hops"]

FORWARD_FLOPS = 4  # per visible pair and head dim element: two products of two operations
BACKWARD_FACTOR = 2.5  # five products instead of two
MAX_SETS = 8
_MEMORY_SHARE = 0.2  # of the device, for all sets of inputs together
# Relative lengths of packed documents: uneven, and cut where no tile of 64 or 128 rows ends.
_DOCUMENTS = (1, 7, 3, 20, 2, 11, 5, 18)


@dataclass(frozen=True)
class Point:
    """One attention problem of batch 1.

    ``window``: a query at p sees keys ``[p - window, p]`` (mask ``window`` only). ``documents``
    are causal and packed, with the boundaries ``boundaries``. ``dtype``: a name in torch.
    ``form``: ``strided`` is (B, S, H, D) in memory; in ``hops`` ours computes the keys of even
    rows, some that nobody sees, and those of odd rows in one call each.
    """

    mask: MaskName
    seq_len: int
    head_dim: int = 128
    heads: int = 16
    kv_heads: int = 16
    dtype: str = "bfloat16"
    direction: Direction = "forward"
    window: int | None = None
    form: Form = "plain"

    def __post_init__(self) -> None:
        if (self.window is None) == (self.mask == "window"):
            raise ValueError(f"window: got {self.window} with mask {self.mask!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: got {self.heads} and {self.kv_heads} key/value heads")

    @property
    def name(self) -> str:
        """``backward/window4k/64k/d128/h32x8/bf16``: unique among points."""
        mask = self.mask if self.window is None else f"window{short(self.window)}"
        heads = f"h{self.heads}" + ("" if self.kv_heads == self.heads else f"x{self.kv_heads}")
        form = () if self.form == "plain" else (self.form,)
        sizes = short(self.seq_len), f"d{self.head_dim}", heads, DTYPES[self.dtype].short
        return "/".join((self.direction, mask, *sizes, *form))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    @property
    def is_half(self) -> bool:
        """True for elements of 16 bits."""
        return DTYPES[self.dtype].itemsize == 2

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def causal(self) -> bool:
        return self.mask != "full"

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """Rows at which documents begin and end, or None without packing."""
        if self.mask != "documents":
            return None
        ends = [sum(_DOCUMENTS[:i]) for i in range(len(_DOCUMENTS) + 1)]
        return tuple(self.seq_len * end // ends[-1] for end in ends)

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head."""
        low, high = self.visible(torch.device("cpu"))
        return int((high - low).sum())

    @property
    def flops(self) -> float:
        """Floating point operations of all heads, from the visible pairs only."""
        forward = FORWARD_FLOPS * self.pairs * self.head_dim * self.heads
        return forward * (BACKWARD_FACTOR if self.direction == "backward" else 1)

    def visible(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the half-open range of keys that each query sees; int64 (S,), non-decreasing."""
        bounds, n = self.boundaries, self.seq_len
        cu = None if bounds is None else torch.tensor(bounds, device=device)
        positions, causal = torch.arange(n, device=device), self.causal
        return visible_range(positions, n, causal=causal, window=self.window, cu_seqlens=cu)


class Inputs(NamedTuple):
    """One set of inputs; see the shapes above."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def short(number: int) -> str:
    """Writes multiples of 1024 as ``16k``, other numbers in full."""
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def make_inputs(point: Point, device: torch.device, seed: int) -> Inputs:
    """Returns random inputs, made on the device: a CPU would take minutes at 128k."""
    generator = None  # on the meta device, which has no memory either
    if device.type != "meta":
        generator = torch.Generator(device).manual_seed(seed)
    shape = (1, point.heads, point.seq_len, point.head_dim)
    kv_shape = (1, point.kv_heads, *shape[2:])
    made = [
        torch.randn(s, generator=generator, device=device).to(point.torch_dtype)
        for s in (shape, kv_shape, kv_shape, shape)
    ]
    if point.form == "strided":
        made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    return Inputs(*made)


def make_sets(
    point: Point, device: torch.device, cache_bytes: int, memory_bytes: int
) -> list[Inputs]:
    """Returns sets of inputs to rotate over, so that no call finds its inputs in the cache.

    Together they exceed twice ``cache_bytes``, as far as ``MAX_SETS`` and a share of
    ``memory_bytes`` allow. Tensors that the direction does not read do not count.
    """
    row = point.head_dim * DTYPES[point.dtype].itemsize * point.seq_len
    tensors = (1 if point.direction == "forward" else 2) * point.heads + 2 * point.kv_heads
    wanted = math.floor(2 * cache_bytes / (row * tensors)) + 1
    held = 2 * row * (point.heads + point.kv_heads)
    fits = math.floor(_MEMORY_SHARE * memory_bytes / held)
    count = max(1, min(wanted, MAX_SETS, fits))
    return [make_inputs(point, device, seed) for seed in range(count)]


@dataclass(frozen=True)
class VirtualPoint:
    """The hops of ``world_size`` ranks in sequence on one device; causal, batch 1."""

    partition: str
    world_size: int
    seq_len: int
    heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def whole(self) -> Point:
        """The same problem in one call (forward)."""
        return Point("causal", self.seq_len, self.head_dim, self.heads, self.heads, self.dtype)

    def name(self, direction: Direction) -> str:
        """Returns ``virtual/zigzag/n8/backward/causal/128k/d128/h8/bf16``."""
        whole = replace(self.whole, direction=direction)
        return f"virtual/{self.partition}/n{self.world_size}/{whole.name}"

    @property
    def names(self) -> tuple[str, ...]:
        return self.name("forward"), self.name("backward")

    @property
    def label(self) -> str:
        """Both directions in one name."""
        return self.name("forward").replace("forward", "*")


PARTITIONS = ("contiguous", "striped", "zigzag", "zigzag-token")


def _both(points: Sequence[Point]) -> list[Point]:
    return [*points, *(replace(p, direction="backward") for p in points)]


def points(which: Which, device: str) -> list[Point]:
    """Returns the points of ``--quick`` or ``--all``, the headlines first; tiny on a CPU."""
    k = 1024
    if device == "cpu":
        tiny = [
            Point("full", 96, 32, 2, 2),
            Point("causal", 131, 64, 2, 2),
            Point("window", 131, 32, 2, 2, window=40),
            Point("documents", 131, 32, 2, 2),
            Point("causal", 96, 32, 4, 2, "float16"),
        ]
        return _both(tiny if which == "all" else tiny[1:3])
    sparse = [Point("window", 16 * k, window=2 * k), Point("documents", 16 * k)]
    dense = [Point("causal", 16 * k), Point("full", 16 * k)]
    first = _both([*dense, *sparse])
    others = [
        Point("causal", 16 * k, head_dim=64),
        Point("causal", 16 * k, head_dim=256, heads=8, kv_heads=8),
        Point("causal", 16 * k, heads=32, kv_heads=8),
        Point("causal", 4 * k),
        Point("causal", 1 * k),
    ]
    if which == "quick":
        return [*first, *others]
    long = [
        Point("causal", 64 * k),
        Point("window", 64 * k, window=4 * k),
        Point("documents", 64 * k),
    ]
    rest = [
        Point("full", 4 * k),
        Point("full", 1 * k),
        Point("full", 16 * k, head_dim=64),
        Point("full", 16 * k, head_dim=256, heads=8, kv_heads=8),
        Point("causal", 16 * k, dtype="float16"),
        Point("full", 64 * k),
        Point("causal", 128 * k, heads=4, kv_heads=4),
        Point("full", 128 * k, heads=4, kv_heads=4),
    ]
    return [*first, *_both(long), *_both(others), *_both(rest)]


def is_headline(point: Point) -> bool:
    """Tells whether a point is one of those by which kernels are compared."""
    return point.mask in ("full", "causal") and replace(point, direction="forward") == Point(
        point.mask, 16 * 1024
    )


def smoke_points(device: str) -> list[Point]:
    """Returns tiny points of all masks and forms, checked before anything else is measured."""
    dims, rows, heads = ((64,), 100, 2) if device == "cpu" else ((64, 128, 256), 333, 4)
    made: list[Point] = []
    for dim in dims:
        full = Point("full", rows, dim, heads, heads)
        made += [full, replace(full, mask="documents")]
        made.append(replace(full, mask="window", window=40, form="strided"))
        made.append(replace(full, mask="causal", kv_heads=heads // 2, form="hops"))
    return _both(made)


def virtual_points(which: Which, device: str) -> list[VirtualPoint]:
    """Returns the virtual rings, the one of the tables first; tiny on a CPU."""
    if device == "cpu":
        sizes = (2,) if which == "quick" else (2, 4)
        return [VirtualPoint(p, n, 128, 2, 32) for n in sizes for p in PARTITIONS]
    long, short_ = 128 * 1024, 16 * 1024
    first = VirtualPoint("zigzag", 8, long)
    if which == "quick":
        return [first, *(VirtualPoint("zigzag", n, long) for n in (2, 4))]
    lengths = (long, 64 * 1024, short_)
    every = [VirtualPoint(p, n, s) for s in lengths for n in (8, 4, 2) for p in PARTITIONS]
    return [first, *(point for point in every if point != first)]
