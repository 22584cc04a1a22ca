"""Forward on Hopper, warp-specialised: one warp copies, two warp groups of 64 rows each compute.

In Gluon, Triton's low-level dialect, because the portable kernel waits for every product: its
softmax never overlaps the tensor cores. Here each group issues the product of the next scores and
that of the last values together, and computes exponentials during the second (FlashAttention-3;
Shah et al., 2024). Tile n uses slot ``n % STAGES`` and its barriers: the copying warp waits until
both groups have freed the slot, fills it, and its bytes complete ``full``.

Edge tiles come first, without overlap; whole tiles follow, overlapped. Both groups visit the tiles
of all 128 rows, so that each tile is loaded once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringray_kernels.backends.triton import tiles

GROUPS = 2
GROUP_ROWS = 64
_GROUPS = gl.constexpr(GROUPS)
_ROWS = gl.constexpr(GROUP_ROWS)
_FLOOR = gl.constexpr(tiles.FLOOR.value)
_LOG2_E = gl.constexpr(tiles.LOG2_E.value)
_LN_2 = gl.constexpr(tiles.LN_2.value)
# Renamed in triton 3.8.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_plan = gluon.jit(tiles.plan_tiles.fn)


@gluon.jit
def _tile(index, leading, whole, edges):
    """Returns the ``index``-th tile in the order of visits."""
    edge = index + gl.where(index >= leading, whole, 0)
    return gl.where(index < edges, edge, leading + index - edges)


@gluon.jit
def _copy(
    k_tiles, v_tiles, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
    low, leading, whole, count, batch, kv_head,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the slots in the order of use: keys one tile ahead of values."""
    edges = count - whole
    BYTES: gl.constexpr = BLOCK_N * D * 2
    for n in range(count + 1):
        wanted = n < count
        slot = n % STAGES
        begin = low + _tile(n, leading, whole, edges) * BLOCK_N
        mbarrier.wait(k_empty.index(slot), ((n // STAGES) & 1) ^ 1, pred=wanted)
        mbarrier.expect(k_full.index(slot), BYTES, pred=wanted)
        _load(
            k_tiles, [batch, kv_head, begin, 0], k_full.index(slot), k_slots.index(slot),
            pred=wanted,
        )  # fmt: skip
        before = gl.maximum(n - 1, 0)
        wanted = n > 0
        slot = before % STAGES
        begin = low + _tile(before, leading, whole, edges) * BLOCK_N
        mbarrier.wait(v_empty.index(slot), ((before // STAGES) & 1) ^ 1, pred=wanted)
        mbarrier.expect(v_full.index(slot), BYTES, pred=wanted)
        _load(
            v_tiles, [batch, kv_head, begin, 0], v_full.index(slot), v_slots.index(slot),
            pred=wanted,
        )  # fmt: skip


@gluon.jit
def _scores(q, k_slots, slot, BLOCK_N: gl.constexpr, D: gl.constexpr, scores: gl.constexpr):
    """Issues q · kᵀ; the caller waits for it."""
    k = k_slots.index(slot).reshape([BLOCK_N, D]).permute((1, 0))
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, scores)
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _softmax(s, top, total, scale):
    """Returns (p, decay, top, total) after the scores of one more tile."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - gl.expand_dims(new_top, 1))
    decay = gl.exp2(top - new_top)
    return p, decay, new_top, total * decay + gl.sum(p, 1)


@gluon.jit
def _as_operand(p, DTYPE: gl.constexpr, values: gl.constexpr):
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, values, 2))


@gluon.jit
def _per_row(x, values: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, values)), 1)


@gluon.jit
def _compute(
    GROUP: gl.constexpr, q_slots, q_full, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
    start, end, out, lse, state_out, state_lse, scale,
    low, high, leading, whole, count, row_base, state_row, query_rows,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
    HAS_STATE: gl.constexpr,
):  # fmt: skip
    """Runs one warp group: 64 query rows against every tile, then their ``out`` and ``lse``."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    row = row_base + GROUP * _ROWS + gl.arange(0, _ROWS, by_row)
    inside = row < query_rows
    row = gl.minimum(row, query_rows - 1)
    edges = count - whole

    top = gl.full([_ROWS], _FLOOR, gl.float32, by_row)
    total = gl.zeros([_ROWS], gl.float32, by_row)
    acc = gl.zeros([_ROWS, D], gl.float32, values)
    mbarrier.wait(q_full, 0)
    q = q_slots.index(GROUP).reshape([_ROWS, D])

    first = gl.load(start + row)
    last = gl.load(end + row)
    for n in range(edges):
        slot = n % STAGES
        phase = (n // STAGES) & 1
        begin = low + _tile(n, leading, whole, edges) * BLOCK_N
        mbarrier.wait(k_full.index(slot), phase)
        s = warpgroup_mma_wait(0, deps=[_scores(q, k_slots, slot, BLOCK_N, D, scores)])
        mbarrier.arrive(k_empty.index(slot), count=1)
        key = gl.expand_dims(begin + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores)), 0)
        seen = (key >= gl.expand_dims(first, 1)) & (key < gl.expand_dims(last, 1))
        s = gl.where(seen, s, float("-inf"))
        p, decay, top, total = _softmax(s, top, total, scale)
        acc = acc * _per_row(decay, values)
        mbarrier.wait(v_full.index(slot), phase)
        v = v_slots.index(slot).reshape([BLOCK_N, D])
        if begin + BLOCK_N > high:
            # Rows that no query here sees may hold NaN, and 0 * NaN is NaN. Both groups write the
            # same zeros, each before it reads.
            blocked: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
            held = v.load(blocked)
            lane = begin + gl.arange(0, BLOCK_N, gl.SliceLayout(1, blocked))
            v.store(gl.where(gl.expand_dims(lane < high, 1), held, 0.0))
            fence_async_shared()
        acc = warpgroup_mma(_as_operand(p, DTYPE, values), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(slot), count=1)

    if whole > 0:
        slot = edges % STAGES
        mbarrier.wait(k_full.index(slot), (edges // STAGES) & 1)
        s = warpgroup_mma_wait(0, deps=[_scores(q, k_slots, slot, BLOCK_N, D, scores)])
        mbarrier.arrive(k_empty.index(slot), count=1)
        p, decay, top, total = _softmax(s, top, total, scale)
        acc = acc * _per_row(decay, values)
        weights = _as_operand(p, DTYPE, values)
        n = edges + 1
        mbarrier.wait(k_full.index(n % STAGES), (n // STAGES) & 1, pred=n < count)
        for n in range(edges + 1, count):
            slot = n % STAGES
            s_next = _scores(q, k_slots, slot, BLOCK_N, D, scores)
            before = (n - 1) % STAGES
            mbarrier.wait(v_full.index(before), ((n - 1) // STAGES) & 1)
            v = v_slots.index(before).reshape([BLOCK_N, D])
            acc_next = warpgroup_mma(weights, v, acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_next])
            mbarrier.arrive(k_empty.index(slot), count=1)
            p, decay, top, total = _softmax(s, top, total, scale)
            # The wait for the next keys stands between softmax and the wait for the values:
            # otherwise the assembler moves the latter up, and nothing overlaps.
            after = n + 1
            mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1, pred=after < count)
            acc = warpgroup_mma_wait(0, deps=[acc_next])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * _per_row(decay, values)
            weights = _as_operand(p, DTYPE, values)
        slot = (count - 1) % STAGES
        mbarrier.wait(v_full.index(slot), ((count - 1) // STAGES) & 1)
        v = v_slots.index(slot).reshape([BLOCK_N, D])
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

    at = state_row + row
    column = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, values)), 0)
    places = gl.expand_dims(gl.convert_layout(at, gl.SliceLayout(1, values)), 1) * D + column
    stored = gl.expand_dims(gl.convert_layout(inside, gl.SliceLayout(1, values)), 1)
    if HAS_STATE:
        state_top = gl.load(state_lse + at) * _LOG2_E
        new_top = gl.maximum(top, state_top)
        decay = gl.exp2(top - new_top)
        share = gl.exp2(state_top - new_top)
        total = total * decay + share
        top = new_top
        earlier = gl.load(state_out + places)
        acc = acc * _per_row(decay, values) + earlier * _per_row(share, values)
    blind = total == 0.0
    total = gl.where(blind, 1.0, total)
    gl.store(lse + at, gl.where(blind, float("-inf"), (top + gl.log2(total)) * _LN_2), mask=inside)
    acc = acc * _per_row(1.0 / total, values)
    hidden = gl.expand_dims(gl.convert_layout(blind, gl.SliceLayout(1, values)), 1)
    acc = gl.where(hidden, 0.0, acc)
    gl.store(out + places, acc.to(out.dtype.element_ty), mask=stored)


@gluon.jit(do_not_specialize=["stride_bounds", "query_rows", "group"])
def hopper_forward_kernel(
    q_tiles, k_tiles, v_tiles, start, end, out, lse, state_out, state_lse, scale,
    stride_bounds, query_rows, group,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_STATE: gl.constexpr, IN_PLACE: gl.constexpr,
):  # fmt: skip
    """Program (block, head, batch entry) computes 128 query rows; see ``forward_kernel``.

    ``q_tiles`` describes q in (1, 1, 64, D) blocks, ``k_tiles`` and ``v_tiles`` K and V in
    (1, 1, BLOCK_N, D) ones; 16-bit elements.
    """
    DTYPE: gl.constexpr = q_tiles.dtype
    BLOCK_M: gl.constexpr = _GROUPS * _ROWS
    row_base = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M
    head = gl.program_id(1)
    batch = gl.program_id(2)
    kv_head = head // group

    wide: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    start += batch.to(gl.int64) * stride_bounds
    end += batch.to(gl.int64) * stride_bounds
    row = gl.minimum(row_base + gl.arange(0, BLOCK_M, wide), query_rows - 1)
    first = gl.load(start + row)
    last = gl.load(end + row)
    low, high, leading, whole, count = _plan(first, last, BLOCK_N)
    if IN_PLACE and count == 0:
        return

    q_slots = gl.allocate_shared_memory(DTYPE, [_GROUPS, 1, 1, _ROWS, D], q_tiles.layout)
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
        mbarrier.init(k_empty.index(slot), count=_GROUPS)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=_GROUPS)
    mbarrier.expect(q_full, BLOCK_M * D * 2)
    for member in gl.static_range(_GROUPS):
        _load(q_tiles, [batch, head, row_base + member * _ROWS, 0], q_full, q_slots.index(member))
    state_row = (batch.to(gl.int64) * gl.num_programs(1) + head) * query_rows
    gl.warp_specialize(
        [
            (_compute, (
                0, q_slots, q_full, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
                start, end, out, lse, state_out, state_lse, scale,
                low, high, leading, whole, count, row_base, state_row, query_rows,
                BLOCK_N, D, STAGES, DTYPE, HAS_STATE,
            )),
            (_compute, (
                1, q_slots, q_full, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
                start, end, out, lse, state_out, state_lse, scale,
                low, high, leading, whole, count, row_base, state_row, query_rows,
                BLOCK_N, D, STAGES, DTYPE, HAS_STATE,
            )),
            (_copy, (
                k_tiles, v_tiles, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
                low, leading, whole, count, batch, kv_head, BLOCK_N, D, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
