"""Checks of every rank of a real ring: ``ringray.shift`` against a loop over one process's rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringray
from ringray.comm.batch import METER
from ringray.partition import BALANCED, NAMES
from tests.support.compile_checks import compiled
from tests.support.ranks import NAN, dealt

Cuts = tuple[int, ...] | tuple[tuple[int, ...], ...]

SEQ_LEN = 37  # odd: every ring of more than one rank holds padding
CUTS = (0, 5, 5, 6, 20, SEQ_LEN)
BY_ROW = ((0, 4, SEQ_LEN), (0, 11, 12, 30, SEQ_LEN))


def sources(by: int, cuts: Cuts | None) -> list[list[int | None]]:
    """Returns the position whose row each position gets, in every batch row; None: the fill."""
    rows = cuts if cuts is not None and isinstance(cuts[0], tuple) else [cuts or (0, SEQ_LEN)] * 2
    table: list[list[int | None]] = []
    for bounds in rows:
        document = [sum(p >= end for end in bounds) for p in range(SEQ_LEN)]  # type: ignore[union-attr]
        table.append(
            [
                p + by if 0 <= p + by < SEQ_LEN and document[p] == document[p + by] else None
                for p in range(SEQ_LEN)
            ]
        )
    return table


def shifted(x: Tensor, by: int, cuts: Cuts | None, fill: float) -> Tensor:
    """Returns the whole result for x (2, SEQ_LEN, ...), row by row."""
    out = torch.full_like(x, fill)
    for batch, row in enumerate(sources(by, cuts)):
        for p, source in enumerate(row):
            if source is not None:
                out[batch, p] = x[batch, source]
    return out


def rows_sent(by: int, cuts: Cuts | None, partition: Any, rank: int, size: int) -> int:
    """Counts the rows of a rank that others need, one by one: of one batch row, or of both where
    each has documents of its own."""
    owner = {}
    for other in range(size):
        for p in ringray.local_positions(partition, SEQ_LEN, size, other).tolist():
            owner[p] = other
    table = sources(by, cuts)
    each = table if cuts is not None and isinstance(cuts[0], tuple) else table[:1]
    return sum(
        source is not None and owner[source] == rank != owner[p]
        for row in each
        for p, source in enumerate(row)
    )


def is_exact(rank: int, size: int) -> None:
    """Values, gradients and bytes under every partition, and deals; NaN in all padding."""
    whole = torch.randn(2, SEQ_LEN, 3, dtype=torch.float64)
    upstream = torch.randn(2, SEQ_LEN, 3, dtype=torch.float64)
    for name in NAMES:
        for cuts in (None, CUTS, BY_ROW):
            partition = dealt(name, SEQ_LEN, cu_seqlens=cuts)
            where: dict[str, Any] = {"dim": 1, "partition": partition}
            mine = ringray.shard(whole, pad_value=NAN, **where).requires_grad_()
            padding = ringray.local_positions(partition, SEQ_LEN, size, rank) >= SEQ_LEN
            for by in (1, -2, SEQ_LEN // 2) if cuts else (1, -1, 0, -7, SEQ_LEN - 1, 10**6):
                what = f"{name}, {cuts}, by {by}"
                before = METER.snapshot()
                out = ringray.shift(mine, by, cu_seqlens=cuts, fill=9, **where)
                sent = METER.since(before)
                expected = shifted(whole, by, cuts, 9)
                assert (out[:, padding] == 9).all(), what
                full = ringray.unshard(out.detach(), seq_len=SEQ_LEN, **where)
                assert torch.equal(full, expected), what
                bytes_of_row = 3 * 8 if cuts is BY_ROW else 2 * 3 * 8
                assert sent.sent_bytes == rows_sent(by, cuts, partition, rank, size) * bytes_of_row
                assert sent.messages <= size - 1, what
                (grad,) = torch.autograd.grad(
                    out, mine, ringray.shard(upstream, pad_value=NAN, **where)
                )
                back = torch.zeros_like(upstream)
                for batch, row in enumerate(sources(by, cuts)):
                    for p, source in enumerate(row):
                        if source is not None:
                            back[batch, source] += upstream[batch, p]
                assert torch.equal(ringray.unshard(grad, seq_len=SEQ_LEN, **where), back), what
                assert (grad[:, padding] == 0).all(), what


def every_dtype(rank: int, size: int) -> None:
    """Labels, masks and 8-bit numbers; the sequence in any dimension, views, remembered lengths."""
    for dtype in (
        torch.int64,
        torch.int16,
        torch.uint8,
        torch.bool,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
    ):
        whole = torch.arange(3 * SEQ_LEN).reshape(3, SEQ_LEN).remainder(7).to(dtype)
        mine = ringray.shard(whole, dim=-1, partition="striped")
        out = ringray.shift(mine, 2, dim=-1, partition="striped", fill=1)
        assert out.dtype == dtype
        assert out.is_contiguous()
        full = ringray.unshard(out.double(), dim=1, partition="striped", seq_len=SEQ_LEN)
        assert torch.equal(full, torch.cat([whole[:, 2:].double(), torch.ones(3, 2)], 1)), dtype
        first = ringray.shift(mine.T, 2, dim=0, partition="striped", seq_len=SEQ_LEN, fill=1)
        assert torch.equal(first.T.double(), out.double())


def fills_are_kept(rank: int, size: int) -> None:
    """Numbers that no fp64 holds, complex ones, and one number in several types."""
    whole = torch.arange(SEQ_LEN)[None]
    last = ringray.local_positions("zigzag", SEQ_LEN, size, rank) >= SEQ_LEN - 1
    for dtype, fill in (
        (torch.int64, 2**53 + 1),
        (torch.complex64, 1j),
        (torch.float32, 0 if rank else 0.0),
    ):
        mine = ringray.shard(whole.to(dtype), dim=1, pad_value=fill)
        for by, rows in ((1, last), (2**70, slice(None)), (-(2**70), slice(None))):
            out = ringray.shift(mine, by, dim=1, fill=fill)
            assert all(value == fill for value in out[0, rows].tolist()), (dtype, by)
    with pytest.raises(ValueError, match=r"fill: got 1j, which torch\.float32 cannot hold"):
        ringray.shift(mine, 1, dim=1, fill=1j)


def gradients_have_gradients(rank: int, size: int) -> None:
    """Of a sum of cubes of shifted rows: the second derivative is 6 times the shifted row."""
    whole = torch.randn(2, SEQ_LEN, dtype=torch.float64)
    where: dict[str, Any] = {"dim": 1, "partition": "striped"}
    mine = ringray.shard(whole, **where).requires_grad_()
    out = ringray.shift(mine, 3, cu_seqlens=CUTS, **where)
    (grad,) = torch.autograd.grad((out**3).sum(), mine, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), mine)
    reached = shifted(shifted(torch.ones_like(whole), 3, CUTS, 0), -3, CUTS, 0)
    got = ringray.unshard(second, seq_len=SEQ_LEN, **where)
    torch.testing.assert_close(got, 6 * whole * reached)


def labels_two_tokens_on(rank: int, size: int) -> None:
    """Compares what a multi-token head needs with what one process cuts out."""
    ids = torch.randint(0, 99, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    partition = dealt(BALANCED, SEQ_LEN, cu_seqlens=CUTS)
    following = ringray.nn.next_token_labels(ids, CUTS)
    two = ringray.nn.next_token_labels(following.where(following >= 0, 0), CUTS)
    mine = ringray.shard(ids, dim=1, partition=partition)
    for by, want in ((1, following), (2, two)):
        expected = shifted(ids, by, CUTS, -100)
        got = ringray.shift(mine, by, dim=1, partition=partition, cu_seqlens=CUTS, fill=-100)
        assert torch.equal(ringray.unshard(got, dim=1, partition=partition), expected)
        if by == 1:
            assert torch.equal(expected, want)


def is_compiled(rank: int, size: int) -> None:
    """Compares with the bits of an eager call, in one graph that serves any deal."""

    def call(x: Tensor, cu: Tensor, partition: Any) -> Tensor:
        out = ringray.shift(x, 3, dim=1, partition=partition, cu_seqlens=cu, fill=2)
        return out * 2

    run = compiled(call)
    for cuts in (CUTS, (0, 9, SEQ_LEN)):
        for name in ("zigzag", BALANCED):
            partition = dealt(name, SEQ_LEN, cu_seqlens=cuts)
            mine = ringray.shard(torch.randn(2, SEQ_LEN, 3), dim=1, partition=partition)
            padded = mine.shape[1] * size if name != BALANCED else SEQ_LEN
            bounds = torch.tensor((*cuts[:-1], padded))
            both = []
            for function in (call, run):
                x = mine.clone().requires_grad_()
                out = function(x, bounds, partition)
                out.sum().backward()
                both.append((out.detach(), x.grad))
            for got, want in zip(*both, strict=True):
                assert torch.equal(got, want)
