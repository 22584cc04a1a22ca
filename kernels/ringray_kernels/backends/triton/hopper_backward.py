"""dK and dV on Hopper, warp-specialised: one warp copies, two warp groups of 64 keys each compute.

As in ``hopper.py``, but keys and values are resident, and the queries and gradients of all query
heads that share the keys are streamed. Per tile, with products transposed (keys, rows)::

    issue s = k qᵀ, dp = v doᵀ     p = exp2(s - lse)       beside dp
    issue dv += p do               ds = p (dp - delta)     beside dv
    issue dk += ds q

Edge tiles of all heads come first, then the whole ones. The order of sums is fixed, so results
repeat bitwise.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringray_kernels.backends.triton.hopper import (
    _GROUPS,
    _LOG2_E,
    _ROWS,
    _as_operand,
    _load,
    _plan,
    _tile,
)


@gluon.jit
def _visit(n, edges, leading, whole, group):
    """Returns the ``n``-th (member of the head group, tile) in the order of visits, edges first."""
    first = n < edges * group
    index = gl.where(first, n, n - edges * group)
    per_member = gl.maximum(gl.where(first, edges, whole), 1)
    member = index // per_member
    index = index - member * per_member
    return member, _tile(gl.where(first, index, edges + index), leading, whole, edges)


@gluon.jit
def _copy_rows(
    q_tiles, do_tiles, q_slots, do_slots, full, empty, low, leading, whole, count, batch,
    first_head, group, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the slots, each with q and dout of one tile."""
    edges = count - whole
    BYTES: gl.constexpr = 2 * BLOCK_M * D * 2
    for n in range(count * group):
        member, tile = _visit(n, edges, leading, whole, group)
        begin = low + tile * BLOCK_M
        slot = n % STAGES
        mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), BYTES)
        at = [batch, first_head + member, begin, 0]
        _load(q_tiles, at, full.index(slot), q_slots.index(slot))
        _load(do_tiles, at, full.index(slot), do_slots.index(slot))


@gluon.jit
def _clean(slot, present, BLOCK_M: gl.constexpr, D: gl.constexpr, blocked: gl.constexpr):
    """Zeroes rows of a slot that may hold NaN. Both groups write the same, each before it reads."""
    held = slot.load(blocked)
    slot.store(gl.where(gl.expand_dims(present, 1), held, 0.0))


@gluon.jit
def _step(
    k, v, dk, dv, q_slots, do_slots, full, empty, n, member, begin, lse, delta, high, first, last,
    query_rows, log2_scale, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    DTYPE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds one tile of query rows of one head to (dk, dv)."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    by_column: gl.constexpr = gl.SliceLayout(0, scores)
    slot = n % STAGES
    q = q_slots.index(slot).reshape([BLOCK_M, D])
    do = do_slots.index(slot).reshape([BLOCK_M, D])
    row = begin + gl.arange(0, BLOCK_M, by_column)
    sums = member * query_rows
    if MASKED:
        present = row < high
        row_lse = gl.load(lse + sums + row, mask=present, other=0.0)
        by_delta = present & (row_lse > float("-inf"))
        row_delta = gl.load(delta + sums + row, mask=by_delta, other=0.0)
        mbarrier.wait(full.index(slot), (n // STAGES) & 1)
        blocked: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
        lane = begin + gl.arange(0, BLOCK_M, gl.SliceLayout(1, blocked))
        held = gl.load(lse + sums + lane, mask=lane < high, other=float("-inf"))
        # Rows without any key may hold NaN, and 0 * NaN is NaN.
        _clean(q, held > float("-inf"), BLOCK_M, D, blocked)
        _clean(do, held > float("-inf"), BLOCK_M, D, blocked)
        fence_async_shared()
    else:
        row_lse = gl.load(lse + sums + row)
        row_delta = gl.load(delta + sums + row)
        mbarrier.wait(full.index(slot), (n // STAGES) & 1)
    zeros = gl.zeros([_ROWS, BLOCK_M], gl.float32, scores)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p = gl.exp2(s * log2_scale - gl.expand_dims(row_lse * _LOG2_E, 0))
    if MASKED:
        rows = gl.expand_dims(row, 0)
        seen = (rows >= gl.expand_dims(first, 1)) & (rows < gl.expand_dims(last, 1))
        p = gl.where(seen, p, 0.0)
    dv = warpgroup_mma(_as_operand(p, DTYPE, values), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = p * (dp - gl.expand_dims(row_delta, 0))
    dk = warpgroup_mma(_as_operand(ds, DTYPE, values), q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    mbarrier.arrive(empty.index(slot), count=1)
    return dk, dv


@gluon.jit
def _compute_rows(
    GROUP: gl.constexpr, k_slots, v_slots, kv_full, q_slots, do_slots, full, empty,
    start, end, lse, delta, dk, dv, scale, log2_scale,
    stride_dks, stride_dvs, low, high, leading, whole, count, key_base, key_rows, query_rows, group,
    BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Runs one warp group: 64 keys against every tile of every head; adds the sums to dk and dv."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    by_key: gl.constexpr = gl.SliceLayout(1, scores)
    key = key_base + GROUP * _ROWS + gl.arange(0, _ROWS, by_key)
    inside = key < key_rows
    key = gl.minimum(key, key_rows - 1)
    first = gl.load(start + key)
    last = gl.load(end + key)
    # Keys beyond the end repeat the last one and must not be seen twice.
    stop = gl.where(inside, last, first)
    edges = count - whole
    sum_k = gl.zeros([_ROWS, D], gl.float32, values)
    sum_v = gl.zeros([_ROWS, D], gl.float32, values)
    mbarrier.wait(kv_full, 0)
    k = k_slots.index(GROUP).reshape([_ROWS, D])
    v = v_slots.index(GROUP).reshape([_ROWS, D])
    for n in range(edges * group):
        member, tile = _visit(n, edges, leading, whole, group)
        sum_k, sum_v = _step(
            k, v, sum_k, sum_v, q_slots, do_slots, full, empty, n, member, low + tile * BLOCK_M,
            lse, delta, high, first, stop, query_rows, log2_scale,
            BLOCK_M, D, STAGES, DTYPE, True,
        )  # fmt: skip
    for n in range(edges * group, count * group):
        member, tile = _visit(n, edges, leading, whole, group)
        sum_k, sum_v = _step(
            k, v, sum_k, sum_v, q_slots, do_slots, full, empty, n, member, low + tile * BLOCK_M,
            lse, delta, high, first, stop, query_rows, log2_scale,
            BLOCK_M, D, STAGES, DTYPE, False,
        )  # fmt: skip

    by_row: gl.constexpr = gl.SliceLayout(1, values)
    key = key_base + GROUP * _ROWS + gl.arange(0, _ROWS, by_row)
    inside = key < key_rows
    key = gl.minimum(key, key_rows - 1)
    # A key that no query sees may hold NaN, which reaches only its own gradients.
    stored = inside & (gl.load(start + key) < gl.load(end + key))
    stored = gl.expand_dims(stored, 1)
    column = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, values)), 0)
    wide = gl.expand_dims(key.to(gl.int64), 1)
    at = dk + (wide * stride_dks + column)
    gl.store(at, gl.load(at, mask=stored, other=0.0) + sum_k * scale, mask=stored)
    at = dv + (wide * stride_dvs + column)
    gl.store(at, gl.load(at, mask=stored, other=0.0) + sum_v, mask=stored)


@gluon.jit(do_not_specialize=["stride_bounds", "query_rows", "key_rows", "group"])
def hopper_dkv_kernel(
    q_tiles, do_tiles, k_tiles, v_tiles, start, end, lse, delta, dk, dv, scale, log2_scale,
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    stride_bounds, query_rows, key_rows, group,
    D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Program (block, key/value head, batch entry) adds to dk and dv of 128 key rows; see
    ``dkv_kernel``.

    ``q_tiles`` and ``do_tiles`` describe q and dout in (1, 1, BLOCK_M, D) blocks, ``k_tiles`` and
    ``v_tiles`` K and V in (1, 1, 64, D) ones; 16-bit elements.
    """
    DTYPE: gl.constexpr = q_tiles.dtype
    BLOCK_N: gl.constexpr = _GROUPS * _ROWS
    key_base = gl.program_id(0) * BLOCK_N
    kv_head = gl.program_id(1)
    batch = gl.program_id(2)

    wide: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    start += batch.to(gl.int64) * stride_bounds
    end += batch.to(gl.int64) * stride_bounds
    key = gl.minimum(key_base + gl.arange(0, BLOCK_N, wide), key_rows - 1)
    first = gl.load(start + key)
    last = gl.load(end + key)
    low, high, leading, whole, count = _plan(first, last, BLOCK_M)
    if count == 0:
        return

    k_slots = gl.allocate_shared_memory(DTYPE, [_GROUPS, 1, 1, _ROWS, D], k_tiles.layout)
    v_slots = gl.allocate_shared_memory(DTYPE, [_GROUPS, 1, 1, _ROWS, D], v_tiles.layout)
    q_slots = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, D], q_tiles.layout)
    do_slots = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, D], do_tiles.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(kv_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=_GROUPS)
    mbarrier.expect(kv_full, 2 * BLOCK_N * D * 2)
    for part in gl.static_range(_GROUPS):
        at = [batch, kv_head, key_base + part * _ROWS, 0]
        _load(k_tiles, at, kv_full, k_slots.index(part))
        _load(v_tiles, at, kv_full, v_slots.index(part))
    first_head = kv_head * group
    sums = (batch.to(gl.int64) * gl.num_programs(1) * group + first_head) * query_rows
    lse += sums
    delta += sums
    dk += batch.to(gl.int64) * stride_dkb + kv_head.to(gl.int64) * stride_dkh
    dv += batch.to(gl.int64) * stride_dvb + kv_head.to(gl.int64) * stride_dvh
    gl.warp_specialize(
        [
            (_compute_rows, (
                0, k_slots, v_slots, kv_full, q_slots, do_slots, full, empty,
                start, end, lse, delta, dk, dv, scale, log2_scale, stride_dks, stride_dvs,
                low, high, leading, whole, count, key_base, key_rows, query_rows, group,
                BLOCK_M, D, STAGES, DTYPE,
            )),
            (_compute_rows, (
                1, k_slots, v_slots, kv_full, q_slots, do_slots, full, empty,
                start, end, lse, delta, dk, dv, scale, log2_scale, stride_dks, stride_dvs,
                low, high, leading, whole, count, key_base, key_rows, query_rows, group,
                BLOCK_M, D, STAGES, DTYPE,
            )),
            (_copy_rows, (
                q_tiles, do_tiles, q_slots, do_slots, full, empty, low, leading, whole, count,
                batch, first_head, group, BLOCK_M, D, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
