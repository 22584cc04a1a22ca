"""Backward: dQ by blocks of query rows, dK and dV by blocks of key rows, each added in place.

With the *global* lse and delta = rowsum(dout · out), the share of a pair in every gradient is known
without the other hops (Dao, FlashAttention-2, 2023, algorithm 2)::

    p = exp(scale q·k - lse)      ds = p (dout·v - delta)
    dv += pᵀ dout                 dk += scale dsᵀ q             dq += scale ds k

With SOFTCAP the score is ``log2_scale`` times t = tanh(``cap`` q·k), in units of log2, and ds has
the factor 1 - t².

Every element of dq, dk, dv is written by one program in a fixed order, so results repeat bitwise.
With ``ATOMIC_DQ`` the dK/dV kernel adds dQ too: five products per pair, not seven, but the hardware
chooses the order of the additions, and so the last bits of dQ.
"""

import triton
import triton.language as tl

from ringray_kernels.backends.triton.tiles import (
    LOG2_E,
    edge_tile,
    load_tile,
    narrow,
    plan_tiles,
    product,
    store_tile,
    tanh,
)


@triton.jit
def _dq_step(
    dq0, dq1, q0, q1, do0, do1, k, v, lse, delta, low, high, first, last, tile, batch, kv_head,
    scale, cap, stride_kn, stride_kd, stride_vn, stride_vd,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BLOCK_N: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the running (dq0, dq1)."""
    begin = low + tile * BLOCK_N
    columns = tl.arange(0, BLOCK_N)
    present = begin + columns < high
    k1 = q1
    v1 = do1
    if DESCRIPTORS:
        k0 = k.load([batch, kv_head, begin, 0]).reshape(BLOCK_N, D0)
        v0 = v.load([batch, kv_head, begin, 0]).reshape(BLOCK_N, V0)
        if MASKED:  # rows that no query here sees may hold NaN, and 0 * NaN is NaN
            k0 = tl.where(present[:, None], k0, 0.0)
    else:
        k_tile = k + begin.to(tl.int64) * stride_kn
        v_tile = v + begin.to(tl.int64) * stride_vn
        k0 = load_tile(k_tile, columns, present, stride_kn, stride_kd, 0, D0, HEAD_DIM, MASKED)
        v0 = load_tile(v_tile, columns, present, stride_vn, stride_vd, 0, V0, VALUE_DIM, MASKED)
        if D1 > 0:
            k1 = load_tile(k_tile, columns, present, stride_kn, stride_kd, D0, D1, HEAD_DIM, MASKED)
        if V1 > 0:
            v1 = load_tile(
                v_tile, columns, present, stride_vn, stride_vd, V0, V1, VALUE_DIM, MASKED
            )
    s = product(q0, k0, q1, k1, D1, PRECISION)
    if SOFTCAP:
        s = tanh(s * cap)
    dp = product(do0, v0, do1, v1, V1, PRECISION)
    p = tl.exp2(s * scale - lse[:, None])
    ds = p * (dp - delta[:, None])
    if SOFTCAP:
        ds = ds * (1.0 - s * s)
    if MASKED:
        keys = (begin + columns)[None, :]
        ds = tl.where((keys >= first[:, None]) & (keys < last[:, None]), ds, 0.0)
    ds = narrow(ds, k0.dtype, EMULATE_BF16)
    dq0 = tl.dot(ds, k0, dq0, input_precision=PRECISION)
    if D1 > 0:
        dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
    return dq0, dq1


@triton.jit(do_not_specialize=["stride_bounds", "query_rows", "group"])
def dq_kernel(
    dout, q, k, v, lse, delta, start, end, dq, scale, log2_scale, cap,
    stride_ob, stride_oh, stride_os, stride_od,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_bounds, query_rows, group,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACK: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Program (block, head block, batch entry) adds to ``dq`` of one block; see forward_kernel.

    ``lse``, ``delta`` and ``dq`` are contiguous; ``log2_scale`` is ``scale`` times log2(e).
    """
    ROWS: tl.constexpr = BLOCK_M // PACK
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    heads = tl.num_programs(1) * PACK
    batch = tl.program_id(2)
    first_head = tl.program_id(1) * PACK
    kv_head = first_head // group

    lanes = tl.arange(0, BLOCK_M)
    row = block * ROWS + lanes % ROWS
    inside = row < query_rows
    row = tl.minimum(row, query_rows - 1)
    bounds = batch.to(tl.int64) * stride_bounds
    first = tl.load(start + bounds + row)
    last = tl.load(end + bounds + row)
    low, high, leading, whole, count = plan_tiles(first, last, BLOCK_N)
    if count == 0:
        return

    head = first_head + lanes // ROWS
    if not DESCRIPTORS:
        k += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        v += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    head = head.to(tl.int64)
    q_rows = batch.to(tl.int64) * stride_qb + head * stride_qh + row.to(tl.int64) * stride_qs
    o_rows = batch.to(tl.int64) * stride_ob + head * stride_oh + row.to(tl.int64) * stride_os
    q0 = load_tile(q, q_rows, inside, 1, stride_qd, 0, D0, HEAD_DIM, True)
    do0 = load_tile(dout, o_rows, inside, 1, stride_od, 0, V0, VALUE_DIM, True)
    q1 = q0
    do1 = do0
    dq0 = tl.zeros([BLOCK_M, D0], tl.float32)
    dq1 = dq0
    if D1 > 0:
        q1 = load_tile(q, q_rows, inside, 1, stride_qd, D0, D1, HEAD_DIM, True)
        dq1 = tl.zeros([BLOCK_M, D1], tl.float32)
    if V1 > 0:
        do1 = load_tile(dout, o_rows, inside, 1, stride_od, V0, V1, VALUE_DIM, True)
    sums = (batch.to(tl.int64) * heads + head) * query_rows + row
    row_lse = tl.load(lse + sums) * LOG2_E
    row_delta = tl.load(delta + sums)
    for index in range(count - whole):
        dq0, dq1 = _dq_step(
            dq0, dq1, q0, q1, do0, do1, k, v, row_lse, row_delta, low, high, first, last,
            edge_tile(index, leading, whole), batch, kv_head, log2_scale, cap,
            stride_ks, stride_kd, stride_vs, stride_vd, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1,
            BLOCK_N, DESCRIPTORS, PRECISION, EMULATE_BF16, SOFTCAP, True,
        )  # fmt: skip
    for tile in range(leading, leading + whole):
        dq0, dq1 = _dq_step(
            dq0, dq1, q0, q1, do0, do1, k, v, row_lse, row_delta, low, high, first, last,
            tile, batch, kv_head, log2_scale, cap,
            stride_ks, stride_kd, stride_vs, stride_vd, HEAD_DIM, D0, D1, VALUE_DIM, V0, V1,
            BLOCK_N, DESCRIPTORS, PRECISION, EMULATE_BF16, SOFTCAP, False,
        )  # fmt: skip

    # Rows beyond the end repeat the last one and are not stored, nor are rows without keys, whose
    # inputs may hold NaN: NaN reaches only the dq of its own row.
    inside = inside & (first < last)
    base = sums * HEAD_DIM
    dq0 = dq0 * scale + load_tile(dq, base, inside, 1, 1, 0, D0, HEAD_DIM, True)
    store_tile(dq, base, inside, 1, dq0, 0, D0, HEAD_DIM)
    if D1 > 0:
        dq1 = dq1 * scale + load_tile(dq, base, inside, 1, 1, D0, D1, HEAD_DIM, True)
        store_tile(dq, base, inside, 1, dq1, D0, D1, HEAD_DIM)


@triton.jit
def _dkv_step(
    dk0, dk1, dv0, dv1, k0, k1, v0, v1, q, dout, lse, delta, dq, low, high, first, last, tile,
    batch, head, scale, log2_scale, cap, stride_qs, stride_qd, stride_os, stride_od,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BLOCK_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
    SOFTCAP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, ATOMIC_DQ: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds one tile of query rows of one head to the running (dk0, dk1, dv0, dv1). Products are
    transposed, (keys, rows), so that p and ds are left operands of the next products."""
    begin = low + tile * BLOCK_M
    columns = tl.arange(0, BLOCK_M)
    present = begin + columns < high
    if MASKED:
        row_lse = tl.load(lse + begin + columns, mask=present, other=float("-inf"))
        # Rows without any key may hold NaN in q and dout, and 0 * NaN is NaN.
        present = present & (row_lse > float("-inf"))
        row_delta = tl.load(delta + begin + columns, mask=present, other=0.0)
    else:
        row_lse = tl.load(lse + begin + columns)
        row_delta = tl.load(delta + begin + columns)
    q1 = k1
    do1 = v1
    if DESCRIPTORS:
        q0 = q.load([batch, head, begin, 0]).reshape(BLOCK_M, D0)
        do0 = dout.load([batch, head, begin, 0]).reshape(BLOCK_M, V0)
        if MASKED:
            q0 = tl.where(present[:, None], q0, 0.0)
            do0 = tl.where(present[:, None], do0, 0.0)
    else:
        q_tile = q + begin.to(tl.int64) * stride_qs
        o_tile = dout + begin.to(tl.int64) * stride_os
        q0 = load_tile(q_tile, columns, present, stride_qs, stride_qd, 0, D0, HEAD_DIM, MASKED)
        do0 = load_tile(o_tile, columns, present, stride_os, stride_od, 0, V0, VALUE_DIM, MASKED)
        if D1 > 0:
            q1 = load_tile(q_tile, columns, present, stride_qs, stride_qd, D0, D1, HEAD_DIM, MASKED)
        if V1 > 0:
            do1 = load_tile(
                o_tile, columns, present, stride_os, stride_od, V0, V1, VALUE_DIM, MASKED
            )
    s = product(k0, q0, k1, q1, D1, PRECISION)
    if SOFTCAP:
        s = tanh(s * cap)
    p = tl.exp2(s * log2_scale - (row_lse * LOG2_E)[None, :])
    if MASKED:
        rows = (begin + columns)[None, :]
        seen = (rows >= first[:, None]) & (rows < last[:, None])
        p = tl.where(seen, p, 0.0)
    if DV:
        weights = narrow(p, do0.dtype, EMULATE_BF16)
        dv0 = tl.dot(weights, do0, dv0, input_precision=PRECISION)
        if V1 > 0:
            dv1 = tl.dot(weights, do1, dv1, input_precision=PRECISION)
    if DK:
        dp = product(v0, do0, v1, do1, V1, PRECISION)
        ds = p * (dp - row_delta[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - s * s)
        ds = narrow(ds, q0.dtype, EMULATE_BF16)
        dk0 = tl.dot(ds, q0, dk0, input_precision=PRECISION)
        if D1 > 0:
            dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
    if ATOMIC_DQ:
        base = dq + begin.to(tl.int64) * HEAD_DIM
        pointers = base + columns[:, None] * HEAD_DIM
        part = tl.dot(tl.trans(ds), k0, input_precision=PRECISION) * scale
        wide = tl.arange(0, D0)
        mask = present[:, None] & (wide < HEAD_DIM)[None, :]
        tl.atomic_add(pointers + wide[None, :], part, mask=mask, sem="relaxed")
        if D1 > 0:
            part = tl.dot(tl.trans(ds), k1, input_precision=PRECISION) * scale
            wide = D0 + tl.arange(0, D1)
            mask = present[:, None] & (wide < HEAD_DIM)[None, :]
            tl.atomic_add(pointers + wide[None, :], part, mask=mask, sem="relaxed")
    return dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=["stride_bounds", "query_rows", "key_rows", "group"])
def dkv_kernel(
    dout, q, k, v, lse, delta, start, end, dq, dk, dv, scale, log2_scale, cap,
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
    SOFTCAP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, ATOMIC_DQ: tl.constexpr,
):  # fmt: skip
    """Program (block, key/value head, batch entry) adds to ``dk`` and ``dv`` of BLOCK_N key rows,
    over all query heads that share them (DK and DV select one or both). ``start`` and ``end`` are
    inverse intervals, a range of query rows per key row; rows of ``dk`` and ``dv`` are contiguous.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    heads = tl.num_programs(1) * group

    lanes = tl.arange(0, BLOCK_N)
    key = block * BLOCK_N + lanes
    inside = key < key_rows
    key = tl.minimum(key, key_rows - 1)
    bounds = batch.to(tl.int64) * stride_bounds
    first = tl.load(start + bounds + key)
    last = tl.load(end + bounds + key)
    low, high, leading, whole, count = plan_tiles(first, last, BLOCK_M)
    if count == 0:
        return

    k_base = batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    k_rows = k_base + key.to(tl.int64) * stride_ks
    v_rows = v_base + key.to(tl.int64) * stride_vs
    # A key that no query sees may hold NaN, which reaches only its own gradients, and these are not
    # stored. But with ATOMIC_DQ it would reach dq.
    seen = inside & (first < last)
    k0 = load_tile(k, k_rows, seen, 1, stride_kd, 0, D0, HEAD_DIM, True)
    v0 = load_tile(v, v_rows, seen, 1, stride_vd, 0, V0, VALUE_DIM, True)
    k1 = k0
    v1 = v0
    dk0 = tl.zeros([BLOCK_N, D0], tl.float32)
    dv0 = tl.zeros([BLOCK_N, V0], tl.float32)
    dk1 = dk0
    dv1 = dv0
    if D1 > 0:
        k1 = load_tile(k, k_rows, seen, 1, stride_kd, D0, D1, HEAD_DIM, True)
        dk1 = tl.zeros([BLOCK_N, D1], tl.float32)
    if V1 > 0:
        v1 = load_tile(v, v_rows, seen, 1, stride_vd, V0, V1, VALUE_DIM, True)
        dv1 = tl.zeros([BLOCK_N, V1], tl.float32)
    # Rows beyond the end, too, must not be seen twice.
    last = tl.where(inside, last, first)

    for member in range(group):
        head = kv_head * group + member
        sums = (batch.to(tl.int64) * heads + head) * query_rows
        dq_head = dq + sums * HEAD_DIM
        q_head = q
        o_head = dout
        if not DESCRIPTORS:
            q_head = q + (batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh)
            o_head = dout + (batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh)
        for index in range(count - whole):
            dk0, dk1, dv0, dv1 = _dkv_step(
                dk0, dk1, dv0, dv1, k0, k1, v0, v1, q_head, o_head, lse + sums, delta + sums,
                dq_head, low, high, first, last, edge_tile(index, leading, whole), batch, head,
                scale, log2_scale, cap, stride_qs, stride_qd, stride_os, stride_od,
                HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, BLOCK_M, DESCRIPTORS, PRECISION, EMULATE_BF16,
                SOFTCAP, DK, DV, ATOMIC_DQ, True,
            )  # fmt: skip
        for tile in range(leading, leading + whole):
            dk0, dk1, dv0, dv1 = _dkv_step(
                dk0, dk1, dv0, dv1, k0, k1, v0, v1, q_head, o_head, lse + sums, delta + sums,
                dq_head, low, high, first, last, tile, batch, head,
                scale, log2_scale, cap, stride_qs, stride_qd, stride_os, stride_od,
                HEAD_DIM, D0, D1, VALUE_DIM, V0, V1, BLOCK_M, DESCRIPTORS, PRECISION, EMULATE_BF16,
                SOFTCAP, DK, DV, ATOMIC_DQ, False,
            )  # fmt: skip

    key = key.to(tl.int64)
    dk_rows = batch.to(tl.int64) * stride_dkb + kv_head.to(tl.int64) * stride_dkh + key * stride_dks
    dv_rows = batch.to(tl.int64) * stride_dvb + kv_head.to(tl.int64) * stride_dvh + key * stride_dvs
    if DK:
        dk0 = dk0 * scale + load_tile(dk, dk_rows, seen, 1, 1, 0, D0, HEAD_DIM, True)
        store_tile(dk, dk_rows, seen, 1, dk0, 0, D0, HEAD_DIM)
        if D1 > 0:
            dk1 = dk1 * scale + load_tile(dk, dk_rows, seen, 1, 1, D0, D1, HEAD_DIM, True)
            store_tile(dk, dk_rows, seen, 1, dk1, D0, D1, HEAD_DIM)
    if DV:
        dv0 += load_tile(dv, dv_rows, seen, 1, 1, 0, V0, VALUE_DIM, True)
        store_tile(dv, dv_rows, seen, 1, dv0, 0, V0, VALUE_DIM)
        if V1 > 0:
            dv1 += load_tile(dv, dv_rows, seen, 1, 1, V0, V1, VALUE_DIM, True)
            store_tile(dv, dv_rows, seen, 1, dv1, V0, V1, VALUE_DIM)


@triton.jit(do_not_specialize=["rows", "heads"])
def delta_kernel(
    dout, out, lse, delta,
    stride_gb, stride_gh, stride_gs, stride_gd, stride_ob, stride_oh, stride_os, stride_od,
    rows, heads, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes ``delta`` = rowsum(dout · out) in fp32, and 0 where ``lse`` is -inf."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    inside = row < rows
    at = (batch * heads + head) * rows + row
    seen = tl.load(lse + at, mask=inside, other=float("-inf")) > float("-inf")
    wide = row.to(tl.int64)
    g = load_tile(dout + batch * stride_gb + head * stride_gh, wide, seen, stride_gs, stride_gd,
                  0, WIDTH, HEAD_DIM, True)  # fmt: skip
    o = load_tile(out + batch * stride_ob + head * stride_oh, wide, seen, stride_os, stride_od,
                  0, WIDTH, HEAD_DIM, True)  # fmt: skip
    tl.store(delta + at, tl.sum(g.to(tl.float32) * o.to(tl.float32), 1), mask=inside)
