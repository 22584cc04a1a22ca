"""dK and dV on Hopper, warp-specialised, as in ``hopper_forward.py``.

Keys and values are resident, and the queries and gradients of all query heads that share the keys
are streamed, with the lse and delta of their rows beside them. Per tile, with products transposed
(keys, rows)::

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

from ringray_kernels.backends.triton import hopper, tiles
from ringray_kernels.backends.triton.hopper import GROUPS, ROWS


@gluon.jit
def _visit(n, edges, leading, whole, group):
    """Returns the ``n``-th (member of the head group, tile) in the order of visits, edges first."""
    first = n < edges * group
    index = gl.where(first, n, n - edges * group)
    per_member = gl.maximum(gl.where(first, edges, whole), 1)
    member = index // per_member
    index = index - member * per_member
    return member, hopper.tile_of(gl.where(first, index, edges + index), leading, whole, edges)


@gluon.jit
def _copy_pairs(
    operands,
    BLOCK: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Fills the slots, each with a tile of two tensors; with SUMS also lse and delta of its rows:
    lse in units of log2, and 0 for both from row ``high`` on and where a row sees nothing."""
    descriptors, slots, sums, tile_range, batch, first_head, group, rows = operands
    x_tiles, y_tiles = descriptors
    x_slots, y_slots, full, empty = slots
    lse, delta, lse_slots, delta_slots = sums
    low, high, leading, whole, count = tile_range
    edges = count - whole
    BYTES: gl.constexpr = 2 * BLOCK * D * 2
    lanes: gl.constexpr = gl.BlockedLayout([(BLOCK + 31) // 32], [32], [1], [0])
    for n in range(count * group):
        member, tile = _visit(n, edges, leading, whole, group)
        begin = low + tile * BLOCK
        slot = n % STAGES
        if SUMS:
            row = begin + gl.arange(0, BLOCK, lanes)
            inside = row < high
            place = member * rows + row
            row_lse = gl.load(lse + place, mask=inside, other=float("-inf"))
            row_delta = gl.load(delta + place, mask=inside, other=0.0)
            blind = row_lse == float("-inf")
        mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), BYTES)
        coordinates = [batch, first_head + member, begin, 0]
        hopper.load(x_tiles, coordinates, full.index(slot), x_slots.index(slot))
        hopper.load(y_tiles, coordinates, full.index(slot), y_slots.index(slot))
        if SUMS:
            lse_slots.index(slot).store(gl.where(blind, 0.0, row_lse * tiles.LOG2_E))
            delta_slots.index(slot).store(gl.where(blind, 0.0, row_delta))
            mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _compute_dkv(
    GROUP: gl.constexpr,
    operands,
    BLOCK_M: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Runs one warp group: 64 keys against every tile of every head; adds the sums to dk and dv."""
    resident, streamed, tensors, tile_range, block_rows, group = operands
    k_slots, v_slots, kv_full = resident
    q_slots, do_slots, lse_slots, delta_slots, full, empty = streamed
    start, end, dk, dv, scale, log2_scale, stride_dks, stride_dvs = tensors
    low, high, leading, whole, count = tile_range
    gaps, key_base, key_rows = block_rows
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    by_key: gl.constexpr = gl.SliceLayout(1, scores)
    by_column: gl.constexpr = gl.SliceLayout(0, scores)
    key = gl.minimum(key_base + GROUP * ROWS + gl.arange(0, ROWS, by_key), key_rows - 1)
    first = gl.load(start + key)
    last = gl.load(end + key)
    edges = count - whole
    sum_k = gl.zeros([ROWS, D], gl.float32, values)
    sum_v = gl.zeros([ROWS, D], gl.float32, values)
    mbarrier.wait(kv_full, 0)
    k = k_slots.index(GROUP).reshape([ROWS, D])
    v = v_slots.index(GROUP).reshape([ROWS, D])
    # Edge tiles of all heads come first, MASKED; then whole tiles, compiled without masks.
    for MASKED in gl.static_range(1, -1, -1):
        first_visit = 0 if MASKED else edges * group
        stop_visit = edges * group if MASKED else count * group
        for n in range(first_visit, stop_visit):
            _, tile = _visit(n, edges, leading, whole, group)
            slot = n % STAGES
            q = q_slots.index(slot).reshape([BLOCK_M, D])
            do = do_slots.index(slot).reshape([BLOCK_M, D])
            begin = low + tile * BLOCK_M
            mbarrier.wait(full.index(slot), (n // STAGES) & 1)
            if MASKED:  # noqa: SIM102 - known to the compiler
                if (begin + BLOCK_M > high) | (gaps != 0):
                    hopper.clean(q, begin, high, gaps, start, end, key_base, key_rows, BLOCK_M, D)
                    hopper.clean(do, begin, high, gaps, start, end, key_base, key_rows, BLOCK_M, D)
                    fence_async_shared()
            zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, scores)
            s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            row_lse = gl.expand_dims(lse_slots.index(slot).load(by_column), 0)
            row_delta = gl.expand_dims(delta_slots.index(slot).load(by_column), 0)
            s = warpgroup_mma_wait(1, deps=[s])
            if MASKED:
                trailing = (tile >= leading) | (whole == 0)
                s = hopper.masked(s, begin, first, last, tile < leading, trailing, scores)
            p = gl.exp2(s * log2_scale - row_lse)
            sum_v = warpgroup_mma(hopper.as_operand(p, DTYPE, values), do, sum_v, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = p * (dp - row_delta)
            sum_k = warpgroup_mma(hopper.as_operand(ds, DTYPE, values), q, sum_k, is_async=True)
            sum_k, sum_v = warpgroup_mma_wait(0, deps=[sum_k, sum_v])
            mbarrier.arrive(empty.index(slot), count=1)

    by_row: gl.constexpr = gl.SliceLayout(1, values)
    key = key_base + GROUP * ROWS + gl.arange(0, ROWS, by_row)
    inside = key < key_rows
    key = gl.minimum(key, key_rows - 1)
    # A key that no query sees may hold NaN, which reaches only its own gradients.
    stored = inside & (gl.load(start + key) < gl.load(end + key))
    stored = gl.expand_dims(stored, 1)
    column = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, values)), 0)
    wide = gl.expand_dims(key.to(gl.int64), 1)
    pointers = dk + (wide * stride_dks + column)
    gl.store(pointers, gl.load(pointers, mask=stored, other=0.0) + sum_k * scale, mask=stored)
    pointers = dv + (wide * stride_dvs + column)
    gl.store(pointers, gl.load(pointers, mask=stored, other=0.0) + sum_v, mask=stored)


@gluon.jit(do_not_specialize=["copies", "heads", "query_rows", "key_rows", "group"])
def hopper_dkv_kernel(
    q_tiles, do_tiles, k_tiles, v_tiles, plan, start, end, lse, delta, dk, dv, scale, log2_scale,
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    copies, heads, query_rows, key_rows, group,
    D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Program n adds to dk and dv of the n-th block of 128 key rows in the order of ``plan``; see
    ``dkv_kernel`` and ``hopper_forward_kernel``. ``heads``: key/value heads.

    ``q_tiles`` and ``do_tiles`` describe q and dout in (1, 1, BLOCK_M, D) blocks, ``k_tiles`` and
    ``v_tiles`` K and V in (1, 1, 64, D) ones; 16-bit elements.
    """
    DTYPE: gl.constexpr = q_tiles.dtype
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    batch, kv_head, bounds, block, low, high, leading, whole, count, gaps = hopper.work(
        gl.program_id(0), plan, copies, heads
    )
    if count == 0:
        return
    key_base = block * BLOCK_N
    start += bounds.to(gl.int64) * key_rows
    end += bounds.to(gl.int64) * key_rows

    k_slots = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, D], k_tiles.layout)
    v_slots = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, D], v_tiles.layout)
    q_slots = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, D], q_tiles.layout)
    do_slots = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, D], do_tiles.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_slots = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    delta_slots = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(kv_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=2)  # the bytes of q and dout, then lse and delta
        mbarrier.init(empty.index(slot), count=GROUPS)
    mbarrier.expect(kv_full, 2 * BLOCK_N * D * 2)
    for part in gl.static_range(GROUPS):
        coordinates = [batch, kv_head, key_base + part * ROWS, 0]
        hopper.load(k_tiles, coordinates, kv_full, k_slots.index(part))
        hopper.load(v_tiles, coordinates, kv_full, v_slots.index(part))
    first_head = kv_head * group
    sums = (batch.to(gl.int64) * heads * group + first_head) * query_rows
    dk += batch.to(gl.int64) * stride_dkb + kv_head.to(gl.int64) * stride_dkh
    dv += batch.to(gl.int64) * stride_dvb + kv_head.to(gl.int64) * stride_dvh
    # A warp group takes its operands in tuples of what goes together.
    resident = (k_slots, v_slots, kv_full)
    streamed = (q_slots, do_slots, lse_slots, delta_slots, full, empty)
    tensors = (start, end, dk, dv, scale, log2_scale, stride_dks, stride_dvs)
    tile_range = (low, high, leading, whole, count)
    compute = (resident, streamed, tensors, tile_range, (gaps, key_base, key_rows), group)
    slots = (q_slots, do_slots, full, empty)
    of_rows = (lse + sums, delta + sums, lse_slots, delta_slots)
    copy = ((q_tiles, do_tiles), slots, of_rows, tile_range, batch, first_head, group, query_rows)
    gl.warp_specialize(
        [
            (_compute_dkv, (0, compute, BLOCK_M, D, STAGES, DTYPE)),
            (_compute_dkv, (1, compute, BLOCK_M, D, STAGES, DTYPE)),
            (_copy_pairs, (copy, BLOCK_M, D, STAGES, True)),
        ],
        [4, 1],
        [240, 24],
    )
