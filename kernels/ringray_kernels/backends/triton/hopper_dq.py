"""dQ on Hopper, warp-specialised, as in ``hopper_forward.py``.

Queries and gradients are resident, keys and values are streamed. Per whole tile::

    issue s = q kᵀ                 ds = p (dp - delta) of the tile before, beside s
    issue dq += ds k, then dp      p = exp2(s - lse)       beside both

The order of sums is fixed, so results repeat bitwise.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringray_kernels.backends.triton import hopper, tiles
from ringray_kernels.backends.triton.hopper import GROUPS, ROWS
from ringray_kernels.backends.triton.hopper_dkv import _copy_pairs


@gluon.jit
def _compute_dq(
    GROUP: gl.constexpr,
    operands,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Runs one warp group: 64 query rows against every tile; adds the sums to dq."""
    resident, streamed, tensors, tile_range, block_rows = operands
    q_slots, do_slots, rows_full = resident
    k_slots, v_slots, full, empty = streamed
    start, end, lse, delta, dq, scale, log2_scale = tensors
    low, high, leading, whole, count = tile_range
    gaps, base, query_rows = block_rows
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    row = gl.minimum(base + GROUP * ROWS + gl.arange(0, ROWS, by_row), query_rows - 1)
    first = gl.load(start + row)
    last = gl.load(end + row)
    row_lse = gl.expand_dims(gl.load(lse + row) * tiles.LOG2_E, 1)
    row_delta = gl.expand_dims(gl.load(delta + row), 1)
    edges = count - whole
    acc = gl.zeros([ROWS, D], gl.float32, values)
    mbarrier.wait(rows_full, 0)
    q = q_slots.index(GROUP).reshape([ROWS, D])
    do = do_slots.index(GROUP).reshape([ROWS, D])
    for n in range(edges):
        slot = n % STAGES
        tile = hopper.tile_of(n, leading, whole, edges)
        begin = low + tile * BLOCK_N
        mbarrier.wait(full.index(slot), (n // STAGES) & 1)
        k = k_slots.index(slot).reshape([BLOCK_N, D])
        s = hopper.scores_of(q, k_slots, slot, BLOCK_N, D, scores)
        dp = hopper.scores_of(do, v_slots, slot, BLOCK_N, D, scores)
        s = warpgroup_mma_wait(1, deps=[s])
        trailing = (n >= leading) | (whole == 0)
        p = gl.exp2(
            hopper.masked(s, begin, first, last, n < leading, trailing, scores) * log2_scale
            - row_lse
        )
        dp = warpgroup_mma_wait(0, deps=[dp])
        # dp of keys that this row does not see may be NaN.
        ds = gl.where(p == 0.0, 0.0, p * (dp - row_delta))
        if (begin + BLOCK_N > high) | (gaps != 0):
            hopper.clean(k, begin, high, gaps, start, end, base, query_rows, BLOCK_N, D)
            fence_async_shared()
        acc = warpgroup_mma(hopper.as_operand(ds, DTYPE, values), k, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)

    if whole > 0:
        before = edges % STAGES
        phase = (edges // STAGES) & 1
        mbarrier.wait(full.index(before), phase)
        s = hopper.scores_of(q, k_slots, before, BLOCK_N, D, scores)
        dp = hopper.scores_of(do, v_slots, before, BLOCK_N, D, scores)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(s * log2_scale - row_lse)
        dp = warpgroup_mma_wait(0, deps=[dp])
        slot, phase = hopper.next_slot(before, phase, STAGES)
        mbarrier.wait(full.index(slot), phase, pred=whole > 1)
        for n in range(edges + 1, count):
            s_next = hopper.scores_of(q, k_slots, slot, BLOCK_N, D, scores)
            ds = hopper.as_operand(p * (dp - row_delta), DTYPE, values)
            k = k_slots.index(before).reshape([BLOCK_N, D])
            acc_next = warpgroup_mma(ds, k, acc, is_async=True)
            dp_next = hopper.scores_of(do, v_slots, slot, BLOCK_N, D, scores)
            s = warpgroup_mma_wait(2, deps=[s_next])
            p = gl.exp2(s * log2_scale - row_lse)
            # As in forward: without this wait here the next one moves up.
            after, phase = hopper.next_slot(slot, phase, STAGES)
            mbarrier.wait(full.index(after), phase, pred=n + 1 < count)
            dp, acc = warpgroup_mma_wait(0, deps=[dp_next, acc_next])
            mbarrier.arrive(empty.index(before), count=1)
            before = slot
            slot = after
        ds = hopper.as_operand(p * (dp - row_delta), DTYPE, values)
        k = k_slots.index(before).reshape([BLOCK_N, D])
        acc = warpgroup_mma(ds, k, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

    row = base + GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, values))
    inside = row < query_rows
    row = gl.minimum(row, query_rows - 1)
    # A row without keys may hold NaN, which reaches only its own gradients.
    stored = gl.expand_dims(inside & (gl.load(start + row) < gl.load(end + row)), 1)
    column = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, values)), 0)
    pointers = dq + (gl.expand_dims(row.to(gl.int64), 1) * D + column)
    gl.store(pointers, gl.load(pointers, mask=stored, other=0.0) + acc * scale, mask=stored)


@gluon.jit(do_not_specialize=["copies", "heads", "query_rows", "group"])
def hopper_dq_kernel(
    q_tiles, do_tiles, k_tiles, v_tiles, plan, start, end, lse, delta, dq, scale, log2_scale,
    copies, heads, query_rows, group,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Program n adds to dq of the n-th block of 128 query rows in the order of ``plan``; see
    ``dq_kernel`` and ``hopper_forward_kernel``.

    ``q_tiles`` and ``do_tiles`` describe q and dout in (1, 1, 64, D) blocks, ``k_tiles`` and
    ``v_tiles`` K and V in (1, 1, BLOCK_N, D) ones; 16-bit elements. A slot is freed when the tile
    after the next is there: at least three STAGES.
    """
    DTYPE: gl.constexpr = q_tiles.dtype
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    batch, head, bounds, block, low, high, leading, whole, count, gaps = hopper.work(
        gl.program_id(0), plan, copies, heads
    )
    if count == 0:
        return
    base = block * BLOCK_M
    start += bounds.to(gl.int64) * query_rows
    end += bounds.to(gl.int64) * query_rows

    q_slots = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, D], q_tiles.layout)
    do_slots = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, D], do_tiles.layout)
    k_slots = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], k_tiles.layout)
    v_slots = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], v_tiles.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    rows_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(rows_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    mbarrier.expect(rows_full, 2 * BLOCK_M * D * 2)
    for part in gl.static_range(GROUPS):
        coordinates = [batch, head, base + part * ROWS, 0]
        hopper.load(q_tiles, coordinates, rows_full, q_slots.index(part))
        hopper.load(do_tiles, coordinates, rows_full, do_slots.index(part))
    sums = (batch.to(gl.int64) * heads + head) * query_rows
    # A warp group takes its operands in tuples of what goes together.
    streamed = (k_slots, v_slots, full, empty)
    tensors = (start, end, lse + sums, delta + sums, dq + sums * D, scale, log2_scale)
    tile_range = (low, high, leading, whole, count)
    resident = (q_slots, do_slots, rows_full)
    compute = (resident, streamed, tensors, tile_range, (gaps, base, query_rows))
    unused = (lse, delta, lse, delta)
    copy = ((k_tiles, v_tiles), streamed, unused, tile_range, batch, head // group, 1, query_rows)
    gl.warp_specialize(
        [
            (_compute_dq, (0, compute, BLOCK_N, D, STAGES, DTYPE)),
            (_compute_dq, (1, compute, BLOCK_N, D, STAGES, DTYPE)),
            (_copy_pairs, (copy, BLOCK_N, D, STAGES, False)),
        ],
        [4, 1],
        [240, 24],
    )
