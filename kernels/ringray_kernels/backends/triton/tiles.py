"""Shared parts of the kernels: the tiles that a block of rows visits, loads, casts and products.

The rows that a block sees on the other side span ``[low, high)``; every row of the block sees
``[whole_low, whole_high)``. Both follow from the intervals of the first and the last row, since
bounds never decrease. Tiles start at ``low``, so that a window needs the fewest tiles::

    low        whole_low              whole_high       high
     |  leading   |        whole           |  trailing  |
     +-----+------+------+------+------+---+--+-----+---+
     |  0  |  1   |  2   |  3   |  4   |  5   |  6  |       tiles 2, 3, 4 need no mask

Edge tiles are visited first (both edges in one loop), then the whole ones in a loop without masks.
"""

import triton
import triton.language as tl
from triton.language.random import philox_impl

from ringray_kernels import dropout

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below every score in units of log2, and finite: no row ever computes inf - inf.
FLOOR = tl.constexpr(-1.0e30)
# Arguments of kernels that change from call to call, or are None.
DROPS = ("rows_at", "keys_at", "seed_low", "seed_high", "heads_before", "least")
_ROUNDS = tl.constexpr(dropout.ROUNDS)


@triton.jit
def plan_tiles(first, last, BLOCK: tl.constexpr, ALIGNED: tl.constexpr = False):
    """Returns (low, high, leading tiles, whole tiles, all tiles) for intervals [first, last).

    Empty intervals neither widen the span nor have whole tiles. ALIGNED tiles start at multiples of
    BLOCK."""
    seen = first < last
    low = tl.min(tl.where(seen, first, 0x7FFFFFFF))
    high = tl.max(tl.where(seen, last, 0))
    # If all intervals are empty, high is 0 and the bounds have any values.
    whole_low, whole_high = tl.max(first), tl.minimum(tl.min(last), high)
    low = tl.minimum(low, high)
    if ALIGNED:
        low = low // BLOCK * BLOCK
    count = tl.cdiv(high - low, BLOCK)
    leading = tl.minimum(tl.cdiv(tl.maximum(whole_low - low, 0), BLOCK), count)
    whole = tl.maximum(tl.maximum(whole_high - low, 0) // BLOCK - leading, 0)
    return low, high, leading, whole, count


@triton.jit
def has_gaps(start, row, last, rows):
    """Returns whether some tile row between those that the block's rows see may be seen by none."""
    return tl.max((tl.load(start + tl.minimum(row + 1, rows - 1)) > last).to(tl.int32)) > 0


@triton.jit
def _rows_up_to(bound, tile_rows, rows, ROWS: tl.constexpr):
    """Returns how many of the block's ROWS rows have a ``bound`` up to each tile row."""
    count = tile_rows * 0
    # Bounds never decrease: a binary search, bit by bit, as blocks have at most 256 rows.
    for step in tl.static_range(9):
        candidate = count + (256 >> step)
        row = tl.minimum(candidate, rows) - 1
        inside = candidate <= ROWS
        up_to = tl.load(bound + row, mask=inside, other=0x7FFFFFFF) <= tile_rows
        count = tl.where(up_to, candidate, count)
    return count


@triton.jit
def seen_by_any(tile_rows, start, end, rows, ROWS: tl.constexpr):
    """Returns which tile rows lie in an interval of a block of ROWS rows, of which ``rows`` exist:
    in those that have begun and not ended."""
    begun = _rows_up_to(start, tile_rows, rows, ROWS)
    return begun > _rows_up_to(end, tile_rows, rows, ROWS)


@triton.jit
def edge_tile(index, leading, whole):
    """Returns the ``index``-th edge tile in the order of visits."""
    return index + tl.where(index >= leading, whole, 0)


@triton.jit
def load_tile(
    base,
    rows,
    seen,
    stride_row,
    stride_col,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Loads (rows, WIDTH) columns from ``FIRST`` on of a tile whose first row ``base`` points to;
    zeros beyond HEAD_DIM, and where not ``seen`` if MASKED."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] * stride_row + columns[None, :] * stride_col
    if FIRST + WIDTH > HEAD_DIM:
        inside = (columns < HEAD_DIM)[None, :]
        if MASKED:
            inside = inside & seen[:, None]
        return tl.load(pointers, mask=inside, other=0.0)
    if MASKED:
        return tl.load(pointers, mask=seen[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_tile(
    base, rows, inside, value, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Does the inverse of ``load_tile``, for rows of contiguous columns."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] + columns[None, :]
    mask = inside[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_parts(
    base,
    rows,
    seen,
    stride_row,
    stride_col,
    W0: tl.constexpr,
    W1: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Loads the columns of a tile in two parts, W0 and W1 wide; both are the first if W1 is 0."""
    part0 = load_tile(base, rows, seen, stride_row, stride_col, 0, W0, HEAD_DIM, MASKED)
    # Triton wants the name before the branch; without a second part nothing reads it.
    part1 = part0
    if W1 > 0:
        part1 = load_tile(base, rows, seen, stride_row, stride_col, W0, W1, HEAD_DIM, MASKED)
    return part0, part1


@triton.jit
def store_parts(
    base, rows, inside, part0, part1, W0: tl.constexpr, W1: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Stores what ``load_parts`` loads, in rows of contiguous columns."""
    store_tile(base, rows, inside, part0, 0, W0, HEAD_DIM)
    if W1 > 0:
        store_tile(base, rows, inside, part1, W0, W1, HEAD_DIM)


@triton.jit
def zero_parts(ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr):
    """Makes sums for a tile of ROWS rows in two parts, as of ``load_parts``."""
    part0 = tl.zeros([ROWS, W0], tl.float32)
    part1 = part0
    if W1 > 0:
        part1 = tl.zeros([ROWS, W1], tl.float32)
    return part0, part1


@triton.jit
def narrow(x, DTYPE: tl.constexpr, EMULATE_BF16: tl.constexpr):
    """Casts ``x`` (fp32) to an operand of a product with DTYPE. The interpreter has no bf16
    products: its operands are fp32, rounded here to the precision of bf16."""
    if EMULATE_BF16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def staying(drop, rows, keys, head, batch):
    """Returns which weights stay at the global positions ``rows`` and ``keys``, which broadcast;
    see ``ringray_kernels.dropout``. ``drop``: words of the seed, heads before the first, least
    number that stays, factor of the weights that do."""
    seed_low, seed_high, heads_before, least, _ = drop
    head = (head + heads_before).to(tl.uint32)
    n0, n1, n2, n3 = philox_impl(
        (keys >> 2).to(tl.uint32),
        rows.to(tl.uint32),
        head,
        batch.to(tl.uint32),
        seed_low.to(tl.uint32, bitcast=True),
        seed_high.to(tl.uint32, bitcast=True),
        _ROUNDS,
    )
    lane = keys & 3
    number = tl.where(lane < 2, tl.where(lane == 0, n0, n1), tl.where(lane == 2, n2, n3))
    return (number >> 1).to(tl.int32) >= least


@triton.jit
def narrow_fp8(x, EMULATE: tl.constexpr):
    """Casts ``x`` (fp32) to e4m3. The interpreter loses the carry into the exponent, so there it is
    rounded before."""
    if EMULATE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def inverse_of_power(x):
    """Returns 1 / x for a power of two, far from the ends of fp32, in one instruction."""
    return (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def log2_of_power(x):
    """Returns log2(x) for a power of two: its exponent, put into the last bits of 2 ** 23."""
    bits = (x.to(tl.int32, bitcast=True) >> 23) + 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388735.0


@triton.jit
def tanh(x):
    """Returns tanh by an exponential; by its series where the rounding of that would show."""
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
    y = x * x
    near = 0.13333333333333333 + y * (-0.05396825396825397 + y * 0.021869488536155203)
    return tl.where(y < 0.0625, x + x * y * (-0.3333333333333333 + y * near), far)


@triton.jit
def bias_of(bias, batch, head, rows):
    """Returns the slopes of ``head``, in units of log2, or pointers to its tables or pairs; the
    positions of ``rows``, which stay, and of those that walk past them; R of tables, or of pairs
    where rows begin and the stride of those that walk. ``bias``: values, their strides between
    batch entries and heads, both positions, R of tables or strides of both in pairs."""
    values = bias[0] + (batch.to(tl.int64) * bias[1] + head.to(tl.int64) * bias[2])
    placed = tl.load(bias[3] + rows)
    if len(bias) == 5:
        return tl.load(values) * LOG2_E, placed, bias[4]
    elif len(bias) == 6:
        return values, placed, bias[4], bias[5]
    else:
        begin = placed.to(tl.int64)[:, None] * bias[5]
        return values + begin, placed, bias[4], begin, bias[6]


@triton.jit
def biased(s, scale, bias, columns, present, FORWARD: tl.constexpr, MASKED: tl.constexpr):
    """Returns ``scale`` times scores ``s`` (rows, columns) with the ``bias`` from ``bias_of``, and
    the places of tables that it is from, or those in rows of pairs. FORWARD: columns are keys."""
    if MASKED:
        across = tl.load(bias[2] + columns, mask=present, other=0)
    else:
        across = tl.load(bias[2] + columns)
    own = bias[1]
    places = across[None, :] - own[:, None] if FORWARD else own[:, None] - across[None, :]
    if len(bias) == 3:
        term = bias[0] * -tl.abs(places).to(tl.float32)
    elif len(bias) == 5:
        places = across.to(tl.int64)[None, :] * bias[4]
        term = tl.load(bias[0] + places).to(tl.float32) * LOG2_E
    else:
        places = tl.minimum(tl.maximum(places, -bias[3]), bias[3]) + bias[3]
        term = tl.load(bias[0] + places) * LOG2_E
    return s * scale + term, places


@triton.jit
def sums_of(sums, bias, block, batch, head):
    """Returns the part of ``sums`` that gradients of this block of rows of one head are added to;
    see ``Bias.sums`` and, for ``bias``, ``bias_of``."""
    if len(bias) == 7:
        return sums + (batch.to(tl.int64) * bias[1] + head.to(tl.int64) * bias[2])
    else:
        program = (batch * tl.num_programs(1) + head).to(tl.int64) * tl.num_programs(0) + block
        return sums + program * (2 * bias[5] + 1)


@triton.jit
def add_to_bias(sums, bias, ds, places, seen):
    """Adds ``ds``, where ``seen``, to pairs, each of which one program of a launch has; or to the
    table ``sums`` of this program alone, place by place, in this order."""
    if len(bias) == 5:
        pairs = sums + bias[3] + places
        tl.store(pairs, tl.load(pairs, mask=seen, other=0.0) + ds, mask=seen)
    else:
        ds = tl.where(seen, ds, 0.0)
        tl.debug_barrier()
        for place in range(tl.min(places), tl.max(places) + 1):
            part = tl.sum(tl.where(places == place, ds, 0.0))
            tl.store(sums + place, tl.load(sums + place) + part)


@triton.jit
def product(a0, b0, a1, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """Returns a · bᵀ over a head dim in one or two parts."""
    s = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if D1 > 0:
        s = tl.dot(a1, tl.trans(b1), s, input_precision=PRECISION)
    return s
