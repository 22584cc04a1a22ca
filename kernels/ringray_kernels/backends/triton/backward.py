"""Backward: dQ by blocks of query rows (``dq.py``), dK and dV by blocks of key rows, each added in
place.

With the *global* lse and delta = rowsum(dout · out), the share of a pair in every gradient is known
without the other hops (Dao, FlashAttention-2, 2023, algorithm 2)::

    p = exp(scale q·k - lse)      ds = p (dout·v - delta)
    dv += pᵀ dout                 dk += scale dsᵀ q             dq += scale ds k

With a bias, its term for the positions of query and key is added to the score; the gradient of a
table is the sum of ds (before any factor) over the pairs that take from a place, by the dQ kernel.
With SOFTCAP the score is ``log2_scale`` times t = tanh(``cap`` q·k), in units of log2, and ds has
the factor 1 - t².

Every element of dq, dk, dv is written by one program in a fixed order, so results repeat bitwise.
"""

import triton
import triton.language as tl

from ringray_kernels.backends.triton import tiles


@triton.jit(do_not_specialize=["stride_bounds", "query_rows", "key_rows", "group", *tiles.DROPS])
def dkv_kernel(
    dout, q, k, v, lse, delta, start, end, dk, dv,
    scale, log2_scale, cap, bias,
    stride_ob, stride_oh, stride_os, stride_od,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    stride_bounds, query_rows, key_rows, group,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
    SOFTCAP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DP_FIRST: tl.constexpr, rows_at=None, keys_at=None, seed_low=None,
    seed_high=None, heads_before=None, least=None, amplify=None,
):  # fmt: skip
    """Program (block, key/value head, batch entry) adds to ``dk`` and ``dv`` of BLOCK_N key rows,
    over all query heads that share them (DK and DV select one or both). ``start`` and ``end`` are
    inverse intervals, a range of query rows per key row; rows of ``dk`` and ``dv`` are contiguous.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    heads = tl.num_programs(1) * group
    drop = None
    if least is not None:
        drop = (seed_low, seed_high, heads_before, least, amplify)

    lanes = tl.arange(0, BLOCK_N)
    key = block * BLOCK_N + lanes
    inside = key < key_rows
    key = tl.minimum(key, key_rows - 1)
    key_positions = key
    if least is not None:
        key_positions = tl.load(keys_at + key)
    bounds = batch.to(tl.int64) * stride_bounds
    first = tl.load(start + bounds + key)
    last = tl.load(end + bounds + key)
    low, high, leading, whole, count = tiles.plan_tiles(first, last, BLOCK_M)
    if count == 0:
        return

    k_base = batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    k_rows = k_base + key.to(tl.int64) * stride_ks
    v_rows = v_base + key.to(tl.int64) * stride_vs
    # A key that no query sees may hold NaN, and its gradients are not stored.
    seen = inside & (first < last)
    k0, k1 = tiles.load_parts(k, k_rows, seen, 1, stride_kd, D0, D1, HEAD_DIM, True)
    v0, v1 = tiles.load_parts(v, v_rows, seen, 1, stride_vd, V0, V1, VALUE_DIM, True)
    dk0, dk1 = tiles.zero_parts(BLOCK_N, D0, D1)
    dv0, dv1 = tiles.zero_parts(BLOCK_N, V0, V1)
    # Rows beyond the end, too, must not be seen twice.
    last = tl.where(inside, last, first)

    for member in range(group):
        head = kv_head * group + member
        sums = (batch.to(tl.int64) * heads + head) * query_rows
        q_head = q
        o_head = dout
        if not DESCRIPTORS:
            q_head = q + (batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh)
            o_head = dout + (batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh)
        head_bias = bias
        if bias is not None:
            head_bias = tiles.bias_of(bias, batch, head, key)
        # Edge tiles come first, MASKED; the loop over whole tiles is compiled without masks.
        # Products are transposed, (keys, rows), so that p and ds are left operands of the next.
        for MASKED in tl.static_range(1, -1, -1):
            first_tile = 0 if MASKED else leading
            stop_tile = count - whole if MASKED else leading + whole
            for index in range(first_tile, stop_tile):
                tile = tiles.edge_tile(index, leading, whole) if MASKED else index
                begin = low + tile * BLOCK_M
                columns = tl.arange(0, BLOCK_M)
                present = begin + columns < high
                if MASKED:
                    row_lse = tl.load(
                        lse + sums + begin + columns, mask=present, other=float("-inf")
                    )
                    # Rows without any key may hold NaN in q and dout, and 0 * NaN is NaN.
                    present = present & (row_lse > float("-inf"))
                    row_delta = tl.load(delta + sums + begin + columns, mask=present, other=0.0)
                else:
                    row_lse = tl.load(lse + sums + begin + columns)
                    row_delta = tl.load(delta + sums + begin + columns)
                if DESCRIPTORS:
                    q0 = q.load([batch, head, begin, 0]).reshape(BLOCK_M, D0)
                    do0 = dout.load([batch, head, begin, 0]).reshape(BLOCK_M, V0)
                    if MASKED:
                        q0 = tl.where(present[:, None], q0, 0.0)
                        do0 = tl.where(present[:, None], do0, 0.0)
                    q1, do1 = q0, do0  # descriptors have one part
                else:
                    q_tile = q_head + begin.to(tl.int64) * stride_qs
                    o_tile = o_head + begin.to(tl.int64) * stride_os
                    q0, q1 = tiles.load_parts(
                        q_tile, columns, present, stride_qs, stride_qd, D0, D1, HEAD_DIM, MASKED
                    )
                    do0, do1 = tiles.load_parts(
                        o_tile, columns, present, stride_os, stride_od, V0, V1, VALUE_DIM, MASKED
                    )
                s = tiles.product(k0, q0, k1, q1, D1, PRECISION)
                if SOFTCAP:
                    s = tiles.tanh(s * cap)
                scores = s * log2_scale
                if bias is not None:
                    scores, _ = tiles.biased(
                        s, log2_scale, head_bias, begin + columns, present, False, MASKED
                    )
                p = tl.exp2(scores - (row_lse * tiles.LOG2_E)[None, :])
                if MASKED:
                    rows = (begin + columns)[None, :]
                    visible = (rows >= first[:, None]) & (rows < last[:, None])
                    p = tl.where(visible, p, 0.0)
                if DP_FIRST:  # then the tensor cores have work during p, at the price of registers
                    dp = tiles.product(v0, do0, v1, do1, V1, PRECISION)
                weights = p
                if drop is not None:
                    row_positions = tl.load(rows_at + begin + columns, mask=present, other=0)
                    stays = tiles.staying(
                        drop, row_positions[None, :], key_positions[:, None], head, batch
                    )
                    weights = tl.where(stays, p, 0.0)
                if DV:
                    weights = tiles.narrow(weights, do0.dtype, EMULATE_BF16)
                    dv0 = tl.dot(weights, do0, dv0, input_precision=PRECISION)
                    if V1 > 0:
                        dv1 = tl.dot(weights, do1, dv1, input_precision=PRECISION)
                if DK:
                    if not DP_FIRST:
                        dp = tiles.product(v0, do0, v1, do1, V1, PRECISION)
                    if drop is not None:
                        dp = tl.where(stays, dp * drop[4], 0.0)
                    ds = p * (dp - row_delta[None, :])
                    if SOFTCAP:
                        ds = ds * (1.0 - s * s)
                    ds = tiles.narrow(ds, q0.dtype, EMULATE_BF16)
                    dk0 = tl.dot(ds, q0, dk0, input_precision=PRECISION)
                    if D1 > 0:
                        dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)

    key = key.to(tl.int64)
    dk_rows = batch.to(tl.int64) * stride_dkb + kv_head.to(tl.int64) * stride_dkh + key * stride_dks
    dv_rows = batch.to(tl.int64) * stride_dvb + kv_head.to(tl.int64) * stride_dvh + key * stride_dvs
    if DK:
        sum0, sum1 = tiles.load_parts(dk, dk_rows, seen, 1, 1, D0, D1, HEAD_DIM, True)
        dk0, dk1 = dk0 * scale + sum0, dk1 * scale + sum1
        tiles.store_parts(dk, dk_rows, seen, dk0, dk1, D0, D1, HEAD_DIM)
    if DV:
        if drop is not None:
            dv0 = dv0 * amplify
            dv1 = dv1 * amplify
        sum0, sum1 = tiles.load_parts(dv, dv_rows, seen, 1, 1, V0, V1, VALUE_DIM, True)
        tiles.store_parts(dv, dv_rows, seen, dv0 + sum0, dv1 + sum1, V0, V1, VALUE_DIM)


@triton.jit(do_not_specialize=["rows", "heads"])
def delta_kernel(
    dout,
    out,
    lse,
    delta,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_gd,
    stride_ob,
    stride_oh,
    stride_os,
    stride_od,
    rows,
    heads,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes ``delta`` = rowsum(dout · out) in fp32, and 0 where ``lse`` is -inf."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    inside = row < rows
    result_row = (batch * heads + head) * rows + row
    seen = tl.load(lse + result_row, mask=inside, other=float("-inf")) > float("-inf")
    wide = row.to(tl.int64)
    dout += batch * stride_gb + head * stride_gh
    g = tiles.load_tile(dout, wide, seen, stride_gs, stride_gd, 0, WIDTH, HEAD_DIM, True)
    out += batch * stride_ob + head * stride_oh
    o = tiles.load_tile(out, wide, seen, stride_os, stride_od, 0, WIDTH, HEAD_DIM, True)
    tl.store(delta + result_row, tl.sum(g.to(tl.float32) * o.to(tl.float32), 1), mask=inside)
