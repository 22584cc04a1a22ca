"""Parts of the kernels for Hopper, warp-specialised: one warp copies, two warp groups of 64 rows
each compute.

In Gluon, Triton's low-level dialect, because the portable kernels wait for every product: their
exponentials never overlap the tensor cores. See ``hopper_forward``, ``hopper_dkv``, ``hopper_dq``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
)

from ringray_kernels.backends.triton.plan import COLUMNS

GROUPS = gl.constexpr(2)
ROWS = gl.constexpr(64)
_COLUMNS = gl.constexpr(COLUMNS)
# Renamed in triton 3.8.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def work(turn, plan, copies, heads):
    """Returns (batch, head, bounds, block, low, high, leading, whole, count, gaps) of one block of
    one head: of the ``turn``-th in the order of the plan, which holds for ``copies`` heads."""
    item = turn // copies
    copy = turn - item * copies
    entry = plan + (item + 1) * _COLUMNS
    bounds = gl.load(entry)
    batch = bounds + copy // heads
    head = copy % heads
    block = gl.load(entry + 1)
    low = gl.load(entry + 2)
    high = gl.load(entry + 3)
    leading = gl.load(entry + 4)
    whole = gl.load(entry + 5)
    count = gl.load(entry + 6)
    gaps = gl.load(entry + 7)
    return batch, head, bounds, block, low, high, leading, whole, count, gaps


@gluon.jit
def tile_of(index, leading, whole, edges):
    """Returns the ``index``-th tile in the order of visits."""
    edge = index + gl.where(index >= leading, whole, 0)
    return gl.where(index < edges, edge, leading + index - edges)


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """Returns the slot of the next tile and its phase: in a loop less than division by STAGES."""
    after = slot + 1
    wraps = after == STAGES
    return gl.where(wraps, 0, after), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def scores_of(q, k_slots, slot, BLOCK_N: gl.constexpr, D: gl.constexpr, scores: gl.constexpr):
    """Issues q · kᵀ; the caller waits for it."""
    k = k_slots.index(slot).reshape([BLOCK_N, D]).permute((1, 0))
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, scores)
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def masked(s, begin, first, last, leading, trailing, scores: gl.constexpr):
    """Returns ``s`` with -inf outside the intervals [first, last) of its rows, from column
    ``begin`` on; a ``leading`` tile may begin before an interval, a ``trailing`` one end after."""
    column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, scores)), 0)
    if leading:
        s = gl.where(column >= gl.expand_dims(first - begin, 1), s, float("-inf"))
    if trailing:
        s = gl.where(column < gl.expand_dims(last - begin, 1), s, float("-inf"))
    return s


@gluon.jit
def clean(tile, begin, high, gaps, start, end, base, rows, TILE: gl.constexpr, D: gl.constexpr):
    """Zeroes the rows of a tile in shared memory, from row ``begin`` on, that no row of the block
    sees: they may hold NaN, and 0 * NaN is NaN. The block is ``[base, base + 128)`` of ``rows``
    with the intervals ``start``, ``end``. Both groups write the same, each before it reads."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    lane = begin + gl.arange(0, TILE, gl.SliceLayout(1, blocked))
    present = lane < high
    if gaps != 0:
        seen = lane < 0  # by no row so far
        for i in range(GROUPS * ROWS):
            row = gl.minimum(base + i, rows - 1)
            seen = seen | ((lane >= gl.load(start + row)) & (lane < gl.load(end + row)))
        present = present & seen
    tile.store(gl.where(gl.expand_dims(present, 1), tile.load(blocked), 0.0))


@gluon.jit
def as_operand(p, DTYPE: gl.constexpr, values: gl.constexpr):
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, values, 2))


@gluon.jit
def per_row(x, values: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, values)), 1)
