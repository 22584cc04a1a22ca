"""dQ, portable: one block of query rows against the key rows that it sees; see ``backward.py``."""

import triton
import triton.language as tl

from ringray_kernels.backends.triton import tiles


@triton.jit(do_not_specialize=["stride_bounds", "query_rows", "group", *tiles.DROPS])
def dq_kernel(
    dout, q, k, v, lse, delta, start, end, dq, scale, log2_scale, cap, bias,
    sums, stride_ob, stride_oh, stride_os, stride_od,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_bounds, query_rows, group,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACK: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
    SOFTCAP: tl.constexpr, rows_at=None, keys_at=None, seed_low=None, seed_high=None,
    heads_before=None, least=None, amplify=None,
):  # fmt: skip
    """Program (block, head block, batch entry) adds to ``dq`` of one block; see forward_kernel.

    ``lse``, ``delta`` and ``dq`` are contiguous; ``log2_scale`` is ``scale`` times log2(e).
    ``sums``: None, or what gradients of the bias are added to; PACK is 1.
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
    row = tl.minimum(row, query_rows - 1)  # rows beyond the end repeat the last one
    bounds = batch.to(tl.int64) * stride_bounds
    first = tl.load(start + bounds + row)
    last = tl.load(end + bounds + row)
    gaps = tiles.has_gaps(start + bounds, row, last, query_rows)
    start += bounds + block * ROWS
    end += bounds + block * ROWS
    low, high, leading, whole, count = tiles.plan_tiles(first, last, BLOCK_N)
    if count == 0:
        return

    head = first_head + lanes // ROWS
    drop = None
    row_positions = row
    if least is not None:
        drop = (seed_low, seed_high, heads_before, least, amplify)
        row_positions = tl.load(rows_at + row)
    if not DESCRIPTORS:
        k += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        v += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    # As in forward: offsets of rows are 64 bits wide.
    head = head.to(tl.int64)
    q_rows = batch.to(tl.int64) * stride_qb + head * stride_qh + row.to(tl.int64) * stride_qs
    o_rows = batch.to(tl.int64) * stride_ob + head * stride_oh + row.to(tl.int64) * stride_os
    q0, q1 = tiles.load_parts(q, q_rows, inside, 1, stride_qd, D0, D1, HEAD_DIM, True)
    do0, do1 = tiles.load_parts(dout, o_rows, inside, 1, stride_od, V0, V1, VALUE_DIM, True)
    if bias is not None:
        if sums is not None:
            sums = tiles.sums_of(sums, bias, block, batch, first_head)
        bias = tiles.bias_of(bias, batch, head[:, None], row)
    if sums is not None:
        last = tl.where(inside, last, first)  # of rows beyond the end nothing is added
    of_rows = (batch.to(tl.int64) * heads + head) * query_rows + row
    row_lse = tl.load(lse + of_rows) * tiles.LOG2_E
    row_delta = tl.load(delta + of_rows)
    dq0, dq1 = tiles.zero_parts(BLOCK_M, D0, D1)
    # Edge tiles come first, MASKED; the loop over whole tiles is compiled without masks.
    for MASKED in tl.static_range(1, -1, -1):
        first_tile = 0 if MASKED else leading
        stop_tile = count - whole if MASKED else leading + whole
        for index in range(first_tile, stop_tile):
            tile = tiles.edge_tile(index, leading, whole) if MASKED else index
            rows_to_end = query_rows - block * ROWS
            begin = low + tile * BLOCK_N
            columns = tl.arange(0, BLOCK_N)
            present = begin + columns < high
            if MASKED:  # noqa: SIM102 - known to the compiler
                if gaps:
                    present = present & tiles.seen_by_any(
                        begin + columns, start, end, rows_to_end, ROWS
                    )
            if DESCRIPTORS:
                k0 = k.load([batch, kv_head, begin, 0]).reshape(BLOCK_N, D0)
                v0 = v.load([batch, kv_head, begin, 0]).reshape(BLOCK_N, V0)
                if MASKED:  # keys that no query here sees may hold NaN, and 0 * NaN is NaN
                    k0 = tl.where(present[:, None], k0, 0.0)
                k1, v1 = k0, v0
            else:
                k_tile = k + begin.to(tl.int64) * stride_ks
                v_tile = v + begin.to(tl.int64) * stride_vs
                k0, k1 = tiles.load_parts(
                    k_tile, columns, present, stride_ks, stride_kd, D0, D1, HEAD_DIM, MASKED
                )
                v0, v1 = tiles.load_parts(
                    v_tile, columns, present, stride_vs, stride_vd, V0, V1, VALUE_DIM, MASKED
                )
            s = tiles.product(q0, k0, q1, k1, D1, PRECISION)
            if SOFTCAP:
                s = tiles.tanh(s * cap)
            scores = s * log2_scale
            if bias is not None:
                scores, places = tiles.biased(
                    s, log2_scale, bias, begin + columns, present, True, MASKED
                )
            dp = tiles.product(do0, v0, do1, v1, V1, PRECISION)
            if drop is not None:
                key_positions = tl.load(keys_at + begin + columns, mask=present, other=0)
                stays = tiles.staying(
                    drop, row_positions[:, None], key_positions[None, :], head[:, None], batch
                )
                dp = tl.where(stays, dp * drop[4], 0.0)
            p = tl.exp2(scores - row_lse[:, None])
            ds = p * (dp - row_delta[:, None])
            if sums is not None:  # the bias is added last: ds before any other factor
                keys = (begin + columns)[None, :]
                seen = (keys >= first[:, None]) & (keys < last[:, None])
                tiles.add_to_bias(sums, bias, ds, places, seen)
            if SOFTCAP:
                ds = ds * (1.0 - s * s)
            if MASKED:
                keys = (begin + columns)[None, :]
                ds = tl.where((keys >= first[:, None]) & (keys < last[:, None]), ds, 0.0)
            ds = tiles.narrow(ds, k0.dtype, EMULATE_BF16)
            dq0 = tl.dot(ds, k0, dq0, input_precision=PRECISION)
            if D1 > 0:
                dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)

    # Rows beyond the end repeat the last one and are not stored, nor are rows without keys, whose
    # inputs may hold NaN: NaN reaches only the dq of its own row.
    inside = inside & (first < last)
    base = of_rows * HEAD_DIM
    sum0, sum1 = tiles.load_parts(dq, base, inside, 1, 1, D0, D1, HEAD_DIM, True)
    dq0, dq1 = dq0 * scale + sum0, dq1 * scale + sum1
    tiles.store_parts(dq, base, inside, dq0, dq1, D0, D1, HEAD_DIM)
