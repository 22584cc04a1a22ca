"""Forward on Hopper, warp-specialised: one warp copies, two warp groups of 64 rows each compute.

Each group issues the product of the next scores and that of the last values together, and computes
exponentials during the second (FlashAttention-3; Shah et al., 2024).

A program computes one of the blocks that a plan names (see ``plan.py``), the heaviest first. Tile n
uses slot ``n % STAGES`` and its barriers: the copying warp waits until both groups have freed the
slot, fills it, and its bytes complete ``full``.

Edge tiles come first, without overlap; whole tiles follow, overlapped. Both groups visit the tiles
of all 128 rows, so that each tile is loaded once.
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

# A row's sum in eight parts, two per thread: those of the columns that the thread has of scores.
_PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 8],
    )
)


@gluon.jit
def _copy(operands, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Fills the slots in the order of use: keys one tile ahead of values."""
    work, group, descriptors, slots, barriers = operands
    q_tiles, k_tiles, v_tiles = descriptors
    q_slots, k_slots, v_slots = slots
    q_full, k_full, k_empty, v_full, v_empty = barriers
    BYTES: gl.constexpr = BLOCK_N * D * 2
    plan, copies, heads = work
    batch, head, _, block, low, _, leading, whole, count, _ = hopper.work(
        gl.program_id(0), plan, copies, heads
    )
    kv_head = head // group
    edges = count - whole
    mbarrier.expect(q_full, GROUPS * ROWS * D * 2)
    for member in gl.static_range(GROUPS):
        begin = (block * GROUPS + member) * ROWS
        hopper.load(q_tiles, [batch, head, begin, 0], q_full, q_slots.index(member))
    for n in range(count + 1):
        wanted = n < count
        slot = n % STAGES
        begin = low + hopper.tile_of(n, leading, whole, edges) * BLOCK_N
        mbarrier.wait(k_empty.index(slot), ((n // STAGES) & 1) ^ 1, pred=wanted)
        mbarrier.expect(k_full.index(slot), BYTES, pred=wanted)
        hopper.load(
            k_tiles,
            [batch, kv_head, begin, 0],
            k_full.index(slot),
            k_slots.index(slot),
            pred=wanted,
        )
        before = gl.maximum(n - 1, 0)
        wanted = n > 0
        slot = before % STAGES
        begin = low + hopper.tile_of(before, leading, whole, edges) * BLOCK_N
        mbarrier.wait(v_empty.index(slot), ((before // STAGES) & 1) ^ 1, pred=wanted)
        mbarrier.expect(v_full.index(slot), BYTES, pred=wanted)
        hopper.load(
            v_tiles,
            [batch, kv_head, begin, 0],
            v_full.index(slot),
            v_slots.index(slot),
            pred=wanted,
        )


@gluon.jit
def _softmax(s, top, total, scale):
    """Returns (p, decay, top, total) after the scores of one more tile."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - gl.expand_dims(new_top, 1))
    decay = gl.exp2(top - new_top)
    parts: gl.constexpr = p.shape[1] // 8
    part = gl.convert_layout(gl.sum(p.reshape([ROWS, parts, 8]), 1), _PARTS)
    shrink = gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, _PARTS)), 1)
    return p, decay, new_top, total * shrink + part


@gluon.jit
def _compute(
    GROUP: gl.constexpr,
    operands,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    DTYPE: gl.constexpr,
    HAS_STATE: gl.constexpr,
):
    """Runs one warp group: 64 query rows against every tile, then their ``out`` and ``lse``."""
    work, slots, barriers, tensors, scale, query_rows = operands
    plan, copies, heads = work
    q_slots, k_slots, v_slots = slots
    q_full, k_full, k_empty, v_full, v_empty = barriers
    start, end, out, lse, state_out, state_lse = tensors
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    batch, head, bounds, block, low, high, leading, whole, count, gaps = hopper.work(
        gl.program_id(0), plan, copies, heads
    )
    base = block * GROUPS * ROWS
    row = base + GROUP * ROWS + gl.arange(0, ROWS, by_row)
    inside = row < query_rows
    row = gl.minimum(row, query_rows - 1)
    edges = count - whole
    starts = start + bounds.to(gl.int64) * query_rows
    ends = end + bounds.to(gl.int64) * query_rows
    first = gl.load(starts + row)
    last = gl.load(ends + row)

    top = gl.full([ROWS], tiles.FLOOR, gl.float32, by_row)
    total = gl.zeros([ROWS, 8], gl.float32, _PARTS)
    acc = gl.zeros([ROWS, D], gl.float32, values)
    mbarrier.wait(q_full, 0)
    q = q_slots.index(GROUP).reshape([ROWS, D])
    for n in range(edges):
        slot = n % STAGES
        phase = (n // STAGES) & 1
        begin = low + hopper.tile_of(n, leading, whole, edges) * BLOCK_N
        mbarrier.wait(k_full.index(slot), phase)
        s = warpgroup_mma_wait(0, deps=[hopper.scores_of(q, k_slots, slot, BLOCK_N, D, scores)])
        mbarrier.arrive(k_empty.index(slot), count=1)
        trailing = (n >= leading) | (whole == 0)
        s = hopper.masked(s, begin, first, last, n < leading, trailing, scores)
        p, decay, top, total = _softmax(s, top, total, scale)
        acc = acc * hopper.per_row(decay, values)
        mbarrier.wait(v_full.index(slot), phase)
        v = v_slots.index(slot).reshape([BLOCK_N, D])
        if (begin + BLOCK_N > high) | (gaps != 0):
            hopper.clean(v, begin, high, gaps, starts, ends, base, query_rows, BLOCK_N, D)
            fence_async_shared()
        acc = warpgroup_mma(hopper.as_operand(p, DTYPE, values), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(slot), count=1)

    if whole > 0:
        before = edges % STAGES
        phase = (edges // STAGES) & 1
        mbarrier.wait(k_full.index(before), phase)
        s = warpgroup_mma_wait(0, deps=[hopper.scores_of(q, k_slots, before, BLOCK_N, D, scores)])
        mbarrier.arrive(k_empty.index(before), count=1)
        p, decay, top, total = _softmax(s, top, total, scale)
        acc = acc * hopper.per_row(decay, values)
        weights = hopper.as_operand(p, DTYPE, values)
        slot, slot_phase = hopper.next_slot(before, phase, STAGES)
        mbarrier.wait(k_full.index(slot), slot_phase, pred=whole > 1)
        for n in range(edges + 1, count):
            s_next = hopper.scores_of(q, k_slots, slot, BLOCK_N, D, scores)
            mbarrier.wait(v_full.index(before), phase)
            v = v_slots.index(before).reshape([BLOCK_N, D])
            acc_next = warpgroup_mma(weights, v, acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_next])
            mbarrier.arrive(k_empty.index(slot), count=1)
            p, decay, top, total = _softmax(s, top, total, scale)
            # The wait for the next keys stands between softmax and the wait for the values:
            # otherwise the assembler moves the latter up, and nothing overlaps.
            after, after_phase = hopper.next_slot(slot, slot_phase, STAGES)
            mbarrier.wait(k_full.index(after), after_phase, pred=n + 1 < count)
            acc = warpgroup_mma_wait(0, deps=[acc_next])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * hopper.per_row(decay, values)
            weights = hopper.as_operand(p, DTYPE, values)
            before, phase = slot, slot_phase
            slot, slot_phase = after, after_phase
        mbarrier.wait(v_full.index(before), phase)
        v = v_slots.index(before).reshape([BLOCK_N, D])
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before), count=1)

    sums = gl.convert_layout(gl.sum(total, 1), by_row)
    result_row = (batch.to(gl.int64) * heads + head) * query_rows + row
    column = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, values)), 0)
    places = (
        gl.expand_dims(gl.convert_layout(result_row, gl.SliceLayout(1, values)), 1) * D + column
    )
    stored = gl.expand_dims(gl.convert_layout(inside, gl.SliceLayout(1, values)), 1)
    if HAS_STATE:
        state_top = gl.load(state_lse + result_row) * tiles.LOG2_E
        new_top = gl.maximum(top, state_top)
        decay = gl.exp2(top - new_top)
        share = gl.exp2(state_top - new_top)
        sums = sums * decay + share
        top = new_top
        earlier = gl.load(state_out + places)
        acc = acc * hopper.per_row(decay, values) + earlier * hopper.per_row(share, values)
    blind = sums == 0.0
    sums = gl.where(blind, 1.0, sums)
    row_lse = gl.where(blind, float("-inf"), (top + gl.log2(sums)) * tiles.LN_2)
    gl.store(lse + result_row, row_lse, mask=inside)
    acc = acc * hopper.per_row(1.0 / sums, values)
    hidden = gl.expand_dims(gl.convert_layout(blind, gl.SliceLayout(1, values)), 1)
    gl.store(out + places, gl.where(hidden, 0.0, acc).to(out.dtype.element_ty), mask=stored)


@gluon.jit(do_not_specialize=["copies", "heads", "query_rows", "group"])
def hopper_forward_kernel(
    q_tiles, k_tiles, v_tiles, plan, start, end, out, lse, state_out, state_lse, scale,
    copies, heads, query_rows, group,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_STATE: gl.constexpr, IN_PLACE: gl.constexpr,
):  # fmt: skip
    """Program n computes the n-th block of 128 query rows in the order of ``plan``; see
    ``forward_kernel``.

    ``q_tiles`` describes q in (1, 1, 64, D) blocks, ``k_tiles`` and ``v_tiles`` K and V in
    (1, 1, BLOCK_N, D) ones; 16-bit elements. ``copies``: heads that each block stands for, of all
    batch entries with the same bounds.
    """
    DTYPE: gl.constexpr = q_tiles.dtype
    # Blocks that see nothing come last, and are left as they are if in place.
    if IN_PLACE and gl.program_id(0) >= gl.load(plan) * copies:
        return
    q_slots = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, D], q_tiles.layout)
    k_slots = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], k_tiles.layout)
    v_slots = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], v_tiles.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(q_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=GROUPS)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=GROUPS)
    # A warp group takes its operands in tuples of what goes together.
    work = (plan, copies, heads)
    slots = (q_slots, k_slots, v_slots)
    barriers = (q_full, k_full, k_empty, v_full, v_empty)
    tensors = (start, end, out, lse, state_out, state_lse)
    compute = (work, slots, barriers, tensors, scale, query_rows)
    copy = (work, group, (q_tiles, k_tiles, v_tiles), slots, barriers)
    gl.warp_specialize(
        [
            (_compute, (0, compute, BLOCK_N, D, STAGES, DTYPE, HAS_STATE)),
            (_compute, (1, compute, BLOCK_N, D, STAGES, DTYPE, HAS_STATE)),
            (_copy, (copy, BLOCK_N, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
