"""PyTorch's fused attention that returns lse, called on the dense pieces that cover the intervals.

The fast default on CPU (``aten::_scaled_dot_product_flash_attention_for_cpu``) and the fallback on
CUDA (``fused.py`` holds both). K/V heads are shared by a stride of 0, never copied. Pieces of the
same rows are merged in fp32. On a CPU heads are computed a few at a time, which bounds the
allocations of the fused calls (packing, output) to a fraction of one tensor; on a GPU, which one
head leaves idle, many at a time. Head dims that differ are padded with zeros in each call.
Soft-capped and biased scores, and dropout, which no fused call computes, are ``composed``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringray_kernels.api import PLAIN, BackwardOperands, Features, Operands, State
from ringray_kernels.backends import composed, fused
from ringray_kernels.backends.piece import Dropped, Piece
from ringray_kernels.checks import TensorKind
from ringray_kernels.cover import DenseCall, cover
from ringray_kernels.dropout import factors
from ringray_kernels.intervals import derived
from ringray_kernels.merge import merge_

ELEMENTS_PER_CALL = 1 << 19  # of queries or keys: bounds temporaries, and keeps every core busy
ELEMENTS_PER_GPU_CALL = 1 << 27  # as many multiprocessors: all heads of 16k rows
_MOST_ENTRIES = 65535  # of a call: CUDA's limit on a dimension of its grid
_ALIGNMENT = 16  # bytes: what GPUs load at once
LEAST_SCALE = torch.finfo(torch.float32).tiny  # a smaller one is 0 to the fused calls


def unsupported(q: TensorKind, asked: Features = PLAIN) -> str | None:
    """Returns why tensors like ``q`` are not supported: fused calls exist on CPU and CUDA."""
    if q.device.type not in ("cpu", "cuda"):
        return f"got tensors on {q.device.type}, expected cpu or cuda"
    return None


def _readable(x: Tensor) -> Tensor:
    """Returns ``x`` as fused calls assume without a check: with a last stride of 1, and on a GPU
    with aligned rows."""
    if x.stride(-1) == 1 and (fused.on_cpu(x) or _aligned(x)):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # also where only the address is odd


def _aligned(x: Tensor) -> bool:
    places = x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:-1])
    return not any(place % _ALIGNMENT for place in places)


def _additive_mask(
    call: DenseCall, start: Tensor, end: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Returns a mask (rows, keys) of 0 and -inf for a masked call, None otherwise."""
    if call.mode != "masked":
        return None
    keys = torch.arange(call.key, call.key_stop, dtype=torch.int32, device=start.device)
    low = start[call.row : call.row_stop, None]
    high = end[call.row : call.row_stop, None]
    hidden = (keys < low) | (keys >= high)
    return torch.zeros(hidden.shape, dtype=dtype, device=start.device).masked_fill_(
        hidden, -torch.inf
    )


class _Work(NamedTuple):
    """Batch entries that share their intervals, and the calls that cover them."""

    batch: slice
    start: Tensor
    end: Tensor
    calls: list[DenseCall]


def _work(operands: Operands) -> list[_Work]:
    start, end, block = operands.start, operands.end, operands.blocks

    def covers() -> list[list[DenseCall]]:
        return [cover(*pair, block) for pair in zip(start, end, strict=True)]

    entries = len(operands.q) // len(start)  # that share their intervals
    return [
        _Work(slice(i * entries, (i + 1) * entries), start[i], end[i], calls)
        for i, calls in enumerate(derived(start, end, ("cover", block), covers))
    ]


def _by_group(x: Tensor, kv_heads: int) -> Tensor:
    """Views (B, H, S, D) as (B * Hkv, H / Hkv, S, D): one batch entry per key/value head."""
    return x.reshape(-1, x.shape[1] // kv_heads, *x.shape[2:])


def _positive(operands: Operands) -> Operands:
    """Returns queries and a positive scale with the same scores: fused calls scale after masking,
    and no other scale leaves the -inf of a masked score as it is."""
    q, scale = operands.q, operands.scale
    if abs(scale) < LEAST_SCALE:
        return operands._replace(q=torch.zeros_like(q), scale=1.0)
    return operands._replace(q=-q, scale=-scale) if scale < 0 else operands


def _one_width(*tensors: Tensor) -> list[Tensor]:
    """Pads head dims with zeros to the largest of them, on a GPU to a size that its kernels take;
    zeros change no product."""
    width = max(x.shape[-1] for x in tensors)
    if not fused.on_cpu(tensors[0]):
        width += -width % fused.HEAD_DIM_ALIGNMENT
    return [x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors]


def _part(x: Tensor, dim: int, part: slice) -> Tensor:
    """Views a part of a dimension, or returns ``x`` where that is all of it."""
    size = part.stop - part.start
    return x if size == x.shape[dim] else x.narrow(dim, part.start, size)


def _batch_slices(batch: slice, *tensors: Tensor) -> Iterator[slice]:
    """Yields the whole batch if every tensor can be grouped as a view, else one entry at a time."""
    viewable = all(x.shape[0] == 1 or x.stride(0) == x.stride(1) * x.shape[1] for x in tensors)
    if batch.stop - batch.start == 1 or viewable:
        yield batch
    else:
        for b in range(batch.start, batch.stop):
            yield slice(b, b + 1)


def _head_slices(q: Tensor, k: Tensor, *, extended: bool) -> Iterator[slice]:
    """Yields slices of the grouped heads of at most so many elements each. ``extended`` calls,
    ``composed`` of products that read all keys for a few rows, stay small on a GPU."""
    per_entry = q.shape[1] * max(q.shape[2], k.shape[2]) * q.shape[3]
    most = ELEMENTS_PER_CALL if extended or fused.on_cpu(q) else ELEMENTS_PER_GPU_CALL
    step = max(1, min(most // per_entry, _MOST_ENTRIES))
    for first in range(0, q.shape[0], step):
        yield slice(first, min(first + step, q.shape[0]))


def _of_entry(operands: Operands, entry: slice, q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """Returns the operands of some batch entries, the bias with an entry per K/V head."""
    bias, dropout = operands.bias, operands.dropout
    if dropout is not None:
        dropout = dropout._replace(batch=dropout.batch + entry.start)
    bias = bias and bias.by_group(entry, k.shape[1])
    return operands._replace(q=q, k=k, v=v, bias=bias, dropout=dropout)


def _dropped(operands: Operands, call: DenseCall, heads: slice) -> Dropped | None:
    """Returns the factors of a call's weights for some grouped heads, None without dropout."""
    dropout, positions, kv_heads = operands.dropout, operands.at, operands.k.shape[1]
    if dropout is None or positions is None:
        return None
    group, device = operands.q.shape[1] // kv_heads, operands.q.device
    like: dict[str, Any] = {"dtype": torch.int64, "device": device}
    entries = torch.arange(heads.start, heads.stop, **like)[:, None]
    members = entries % kv_heads * group + torch.arange(group, **like)
    rows, keys = positions.rows[call.row : call.row_stop], positions.keys[call.key : call.key_stop]
    return lambda row_slice, key_slice: factors(
        dropout, entries // kv_heads, members, rows[row_slice], keys[key_slice]
    )


def _piece(operands: Operands, call: DenseCall, mask: Tensor | None, heads: slice) -> Piece:
    """Returns what a call computes for some grouped heads, beside the tensors."""
    rows, keys = slice(call.row, call.row_stop), slice(call.key, call.key_stop)
    bias = operands.bias and operands.bias.part(heads, rows, keys)
    scoring = operands.softcap, bias, _dropped(operands, call, heads)
    return Piece(call.mode == "causal", mask, operands.scale, *scoring)


class FusedCalls(Protocol):
    """Fused attention: ``fused`` computes every piece, a vendor's kernels those without a mask in
    16 bits. Shapes of SDPA, K/V heads shared by a stride of 0, one head dim."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk, dv; dk and dv per query head, or summed over those that share them."""


def _kernels_for(
    vendor: FusedCalls | None, q: Tensor, k: Tensor, mask: Tensor | None
) -> FusedCalls:
    """Returns the vendor's kernels if they compute a piece, else ``fused``. cuDNN's backward
    refuses one query row with one key."""
    takes = mask is None and q.dtype != torch.float32 and max(q.shape[2], k.shape[2]) > 1
    return vendor if vendor is not None and takes else fused


def forward(
    operands: Operands,
    state: State | None,
    out_dtype: torch.dtype,
    vendor: FusedCalls | None = None,
) -> State:
    """Computes one hop and merges it into ``state``; see ``ringray_kernels.api.forward``."""
    operands = _positive(operands.widened())
    q, k, v = (_readable(x) for x in operands[:3])
    work = _work(operands)
    # Without earlier state and with one call per row there is no merge: write the final dtype.
    direct = state is None and all(call.first for part in work for call in part.calls)
    if state is None:
        dtype = out_dtype if direct else torch.float32
        out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=dtype, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    else:
        out, lse = state
    for batch, starts, ends, calls in work:
        for call in calls:
            mask = _additive_mask(call, starts, ends, q.dtype)
            for entry in _batch_slices(batch, q, k, v, out, lse):
                ours = [_part(x, 0, entry) for x in (q, k, v, out, lse)]
                part = _of_entry(operands, entry, *ours[:3])
                fresh = state is None and call.first
                _forward_call(call, part, State(*ours[3:]), mask, vendor, fresh=fresh)
    return State(out.to(out_dtype), lse)


def _forward_call(
    call: DenseCall,
    operands: Operands,
    state: State,
    mask: Tensor | None,
    vendor: FusedCalls | None,
    *,
    fresh: bool,
) -> None:
    q, k, v = operands[:3]
    rows, keys = slice(call.row, call.row_stop), slice(call.key, call.key_stop)
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    queries, out, lse = (_part(_by_group(x, kv_heads), 2, rows) for x in (q, *state))
    keys_, values = (_part(_by_group(x, kv_heads), 2, keys) for x in (k, v))
    for heads in _head_slices(queries, keys_, extended=operands.extended):
        own_q, own_k, own_v = (_part(x, 0, heads) for x in (queries, keys_, values))
        piece = _piece(operands, call, mask, heads)
        if operands.extended:
            part, part_lse = composed.forward(own_q, own_k, own_v, piece)
        else:
            own_q, own_k, own_v = _one_width(own_q, own_k, own_v)
            own_k, own_v = (x.expand(-1, group, -1, -1) for x in (own_k, own_v))
            kernels = _kernels_for(vendor, own_q, own_k, mask)
            part, part_lse = kernels.forward(own_q, own_k, own_v, piece)
            part = _part(part, 3, slice(0, v.shape[3]))
        if fresh:
            _part(out, 0, heads).copy_(part)
            _part(lse, 0, heads).copy_(part_lse)
        else:
            merge_(_part(out, 0, heads), _part(lse, 0, heads), part, part_lse)
        del part, part_lse  # before the next call allocates its own


def backward(
    operands: Operands, tensors: BackwardOperands, vendor: FusedCalls | None = None
) -> None:
    """Adds the gradients of one hop in place; see ``ringray_kernels.api.backward``."""
    dout, out, lse, delta, dq, dk, dv = tensors
    positive = _positive(operands)
    if positive.scale != operands.scale:
        dq = torch.zeros_like(dq)  # of the other queries
    q, k, v = positive[:3]
    if operands.extended:
        out = dout  # composed calls take delta in its place
    elif out is None:
        # In fp32: a row that sees one key has dq = 0 only if delta survives unrounded.
        dout, q, k, v = (pad(x.float(), (0, 1)) for x in (dout, q, k, v))
        out = _stand_in(dout, delta)
    q, k, v, dout, out = (_readable(x) for x in (q, k, v, dout, out))
    for batch, starts, ends, calls in _work(operands):
        for call in calls:
            mask = _additive_mask(call, starts, ends, q.dtype)
            for entry in _batch_slices(batch, q, k, v, dout, out, lse, dq, dk, dv):
                ours = [_part(x, 0, entry) for x in (q, k, v, dout, out, lse, delta, dq, dk, dv)]
                part = _of_entry(positive, entry, *ours[:3])
                _backward_call(call, part, BackwardOperands(*ours[3:]), mask, vendor)
    if positive.scale == -operands.scale:
        tensors.dq.sub_(dq)


def _stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """Returns an output with ``rowsum(dout * out) == delta``, all that the fused backward uses.

    In a column of its own, where V is 0: to divide by dout fails where dout is 0, tiny or huge.
    """
    dout[..., -1] = 1
    out = torch.zeros_like(dout)
    out[..., -1] = delta
    return out


def _backward_call(
    call: DenseCall,
    operands: Operands,
    tensors: BackwardOperands,
    mask: Tensor | None,
    vendor: FusedCalls | None,
) -> None:
    q, k, v = operands[:3]
    dout, out, lse, delta, dq, dk, dv = tensors
    assert out is not None, "backward has a stand-in"
    rows, keys = slice(call.row, call.row_stop), slice(call.key, call.key_stop)
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    queries, dout, out, dq = (_part(_by_group(x, kv_heads), 2, rows) for x in (q, dout, out, dq))
    lse, delta = (_part(_by_group(x, kv_heads), 2, rows) for x in (lse, delta))
    k, v, dk, dv = (_part(_by_group(x, kv_heads), 2, keys) for x in (k, v, dk, dv))
    for heads in _head_slices(queries, k, extended=operands.extended):
        grad_out, own_q, own_k, own_v = (_part(x, 0, heads) for x in (dout, queries, k, v))
        lse_rows = _part(lse, 0, heads)
        piece = _piece(operands, call, mask, heads)
        if operands.extended:
            own_delta = _part(delta, 0, heads)
            parts = composed.backward(grad_out, own_q, own_k, own_v, lse_rows, own_delta, piece)
        else:
            grad_out, own_q, own_k, own_v, result = _one_width(
                grad_out, own_q, own_k, own_v, _part(out, 0, heads)
            )
            own_k, own_v = (x.expand(-1, group, -1, -1) for x in (own_k, own_v))
            kernels = _kernels_for(vendor, own_q, own_k, mask)
            parts = kernels.backward(grad_out, own_q, own_k, own_v, result, lse_rows, piece)
            del result
        del grad_out, own_q, own_k, own_v  # padded ones are copies
        part_q = _part(parts[0], 3, slice(0, dq.shape[3]))
        _part(dq, 0, heads).add_(part_q)
        for grad, part in ((_part(dk, 0, heads), parts[1]), (_part(dv, 0, heads), parts[2])):
            # One addition per query head in fp32: the parts share their K/V head.
            for member in range(part.shape[1]):
                member_part = _part(part, 1, slice(member, member + 1))
                grad.add_(_part(member_part, 3, slice(0, grad.shape[3])))
                del member_part
        del parts, part_q, part  # before the next call allocates its own


def delta(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Returns rowsum(dout * out) in fp32; see ``ringray_kernels.api.delta``."""
    return (dout.float() * out).sum(-1).masked_fill_(lse == -torch.inf, 0.0)
