"""Forward: one block of query rows against the key rows that it sees, merged with earlier hops.

FlashAttention-2's loop (Dao, 2023) over per-row intervals. The state of earlier hops is one more
block of keys whose maximum and sum are known: with ``lse`` in place of the maximum its sum is 1 and
its weighted values are ``out``, so the merge needs no extra pass.

A kernel is one long function: a function for the step of its loop would take all of its names.
"""

import triton
import triton.language as tl

from ringray_kernels.backends.triton import tiles

# Weights in e4m3 are at most 2 to this power: most of its numbers are near its largest, 448.
LIFT = tl.constexpr(8.0)


@triton.jit(do_not_specialize=["stride_bounds", "query_rows", "group", "key_rows", *tiles.DROPS])
def forward_kernel(
    q, k, v, start, end, out, lse, state_out, state_lse, scale, cap, bias,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_bounds, query_rows, group,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACK: tl.constexpr,
    HAS_STATE: tl.constexpr, IN_PLACE: tl.constexpr, NEGATE: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
    SOFTCAP: tl.constexpr, rows_at=None, keys_at=None, seed_low=None, seed_high=None,
    heads_before=None, least=None, amplify=None, EMULATE_FP8: tl.constexpr = False,
    query_scales=None, key_scales=None, value_scales=None, key_rows=None,
):  # fmt: skip
    """Program (block, head block, batch entry) computes ``out`` and ``lse`` of one block.

    A block is BLOCK_M / PACK query rows of PACK heads that share a key/value head. ``out``, ``lse``
    and the state are contiguous; ``scale`` is positive and holds log2(e); NEGATE flips its sign.
    With SOFTCAP a score is ``scale`` times tanh(``cap`` q·k). ``bias``: None, or see ``bias_of``.
    With DESCRIPTORS ``k`` and ``v`` are tensor descriptors of (1, 1, BLOCK_N, D0) and (1, 1,
    BLOCK_N, V0) blocks. Dropout, by the global positions ``rows_at`` and ``keys_at``, is
    ``tiles.staying``.

    With scales (contiguous, powers of two) operands are e4m3, and a described V is (B, Hkv, Dv,
    Sk). A score includes the log2 of the scale of its value, so that weights take it into the
    product with V; sums of weights lose it again by its inverse.
    """
    ROWS: tl.constexpr = BLOCK_M // PACK
    # Under a causal mask later rows see most keys and take longest: they go first.
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
    low, high, leading, whole, count = tiles.plan_tiles(
        first, last, BLOCK_N, query_scales is not None and DESCRIPTORS
    )
    if IN_PLACE and count == 0:  # nothing to add to the result of earlier hops
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
    # Whole tensors may pass 2^31 elements, a tile does not: offsets of rows are 64 bits wide.
    q_rows = batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    q_rows += row.to(tl.int64) * stride_qs
    q0, q1 = tiles.load_parts(q, q_rows, inside, 1, stride_qd, D0, D1, HEAD_DIM, True)
    if bias is not None:
        bias = tiles.bias_of(bias, batch, head[:, None], row)
    acc0, acc1 = tiles.zero_parts(BLOCK_M, V0, V1)
    fp8 = None
    if query_scales is not None:
        place = (batch.to(tl.int64) * (heads // group) + kv_head) * key_rows
        lowest = tl.min(tl.where(first < last, first, high))  # tiles may begin before
        fp8 = (key_scales + place, value_scales + place, lowest)
        place = (batch.to(tl.int64) * heads + head) * query_rows + row
        query_scale = tl.load(query_scales + place)[:, None]
        if SOFTCAP:  # the scale of a query is inside of tanh, as that of a key
            cap = cap * query_scale
        else:
            scale = scale * query_scale
    if NEGATE:  # masked scores are -inf before the scale, which so must be positive
        q0 = -q0
        q1 = -q1
    top = tl.full([BLOCK_M], tiles.FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
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
            if MASKED:
                if gaps:
                    present = present & tiles.seen_by_any(
                        begin + columns, start, end, rows_to_end, ROWS
                    )
                if fp8 is not None:
                    present = present & (begin + columns >= fp8[2])
            if DESCRIPTORS:
                k0 = k.load([batch, kv_head, begin, 0]).reshape(BLOCK_N, D0)
                k1 = k0
            else:
                k_tile = k + begin.to(tl.int64) * stride_ks
                k0, k1 = tiles.load_parts(
                    k_tile, columns, present, stride_ks, stride_kd, D0, D1, HEAD_DIM, MASKED
                )
            s = tiles.product(q0, k0, q1, k1, D1, PRECISION)
            factor = scale  # on s, until a step below has multiplied by it
            value_scale = 1.0
            inverse = 1.0
            if fp8 is not None:
                places = begin + columns
                if MASKED:
                    places = tl.minimum(places, high - 1)
                s = s * tl.load(fp8[0] + places)[None, :]
                value_scale = tl.load(fp8[1] + places)
                inverse = tiles.inverse_of_power(value_scale)
            if SOFTCAP:
                s = tiles.tanh(s * cap)
            if bias is not None:
                s, _ = tiles.biased(s, factor, bias, begin + columns, present, True, MASKED)
                factor = 1.0
            if fp8 is not None:
                # exp2 turns the added logarithm into a factor: weights carry the scales of V.
                s = s * factor + tiles.log2_of_power(value_scale)[None, :]
                factor = 1.0
            if MASKED:
                keys = (begin + columns)[None, :]
                s = tl.where((keys >= first[:, None]) & (keys < last[:, None]), s, float("-inf"))
            highest = tl.max(s, 1) * factor
            if fp8 is not None:
                highest -= LIFT
            new_top = tl.maximum(top, highest)
            p = tl.exp2(s * factor - new_top[:, None])
            decay = tl.exp2(top - new_top)
            # lse is that of all weights: those of dropped pairs are in the total.
            if fp8 is not None:
                total = total * decay + tl.sum(p * inverse[None, :], 1)
            else:
                total = total * decay + tl.sum(p, 1)
            top = new_top
            if drop is not None:
                key_positions = tl.load(keys_at + begin + columns, mask=present, other=0)
                stays = tiles.staying(
                    drop, row_positions[:, None], key_positions[None, :], head[:, None], batch
                )
                p = tl.where(stays, p, 0.0)
            if DESCRIPTORS:
                # Keys that no query here sees may hold NaN, and 0 * NaN is NaN.
                if fp8 is not None:
                    v0 = v.load([batch, kv_head, 0, begin]).reshape(V0, BLOCK_N)
                    if MASKED:
                        v0 = tl.where(present[None, :], v0, 0.0)
                    v0 = tl.trans(v0)
                else:
                    v0 = v.load([batch, kv_head, begin, 0]).reshape(BLOCK_N, V0)
                    if MASKED:
                        v0 = tl.where(present[:, None], v0, 0.0)
                v1 = v0
            else:
                v_tile = v + begin.to(tl.int64) * stride_vs
                v0, v1 = tiles.load_parts(
                    v_tile, columns, present, stride_vs, stride_vd, V0, V1, VALUE_DIM, MASKED
                )
            if fp8 is not None:  # sums of tensor cores have few bits: not over many tiles
                weights = tiles.narrow_fp8(p, EMULATE_FP8)
                acc0 = acc0 * decay[:, None] + tl.dot(weights, v0)
                if V1 > 0:
                    acc1 = acc1 * decay[:, None] + tl.dot(weights, v1)
            else:
                weights = tiles.narrow(p, v0.dtype, EMULATE_BF16)
                acc0 = tl.dot(weights, v0, acc0 * decay[:, None], input_precision=PRECISION)
                if V1 > 0:
                    acc1 = tl.dot(weights, v1, acc1 * decay[:, None], input_precision=PRECISION)

    out_row = (batch.to(tl.int64) * heads + head) * query_rows + row
    out_base = out_row * VALUE_DIM
    if drop is not None:
        acc0 = acc0 * amplify
        acc1 = acc1 * amplify
    if HAS_STATE:  # one more block of keys, whose maximum is its lse and whose sum is 1
        state_top = tl.load(state_lse + out_row) * tiles.LOG2_E
        new_top = tl.maximum(top, state_top)
        decay = tl.exp2(top - new_top)
        share = tl.exp2(state_top - new_top)
        total = total * decay + share
        top = new_top
        out0, out1 = tiles.load_parts(state_out, out_base, inside, 1, 1, V0, V1, VALUE_DIM, True)
        acc0 = acc0 * decay[:, None] + out0 * share[:, None]
        acc1 = acc1 * decay[:, None] + out1 * share[:, None]
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    block_lse = tl.where(blind, float("-inf"), (top + tl.log2(total)) * tiles.LN_2)
    tl.store(lse + out_row, block_lse, mask=inside)
    inverse = 1.0 / total
    acc0 = tl.where(blind[:, None], 0.0, acc0 * inverse[:, None])
    acc1 = tl.where(blind[:, None], 0.0, acc1 * inverse[:, None])
    tiles.store_parts(out, out_base, inside, acc0, acc1, V0, V1, VALUE_DIM)
