"""Every transport, by name: exact on real rings, the planner's bytes and messages, bitwise alike.

One ring of processes is started per size and does all checks; ``CASES`` names what is registered,
with the numbers behind a name that are worth a case of their own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringray
from ringray import transport
from ringray.comm.ring import METER
from ringray.lab.predict import cost_model, hardware
from ringray.lab.trial.measurement import peak_memory
from ringray.partition import BALANCED, NAMES
from ringray.traffic import walk
from ringray.traffic.mask import Mask
from ringray_kernels.checks import DTYPES
from tests.support import ring_truth
from tests.support.exhaustive import exhaustive
from tests.support.point import point
from tests.support.ranks import HEAD_DIM, Case, on_ring

NUMBERED = {
    2: ("hybrid:1", "hybrid:2", "allgather:2"),
    3: ("hybrid:3", "double-ring:1", "allgather:2"),
    4: ("hybrid:1", "hybrid:4", "double-ring:1", "double-ring:4", "allgather:3"),
    8: ("hybrid:4", "double-ring:2", "allgather:3"),
}
HEADS = {2: (8, 4), 3: (6, 3), 4: (8, 4), 8: (8, 8)}  # multiples of the ring size
BACKWARDS = ("auto", *walk.BACKWARDS)
TRAFFIC_MASKS = (
    {}, {"causal": False}, {"window": 7}, {"cu": (0, 30, 61)}, {"window": 9, "cu": (0, 1, 33, 61)},
    {"window": 7, "global_tokens": 5}, {"causal": False, "chunk": 9, "global_tokens": 2},
)  # fmt: skip


def names(size: int) -> tuple[str, ...]:
    return (*transport.TRANSPORTS, *NUMBERED[size])


def cases(size: int, mask: dict[str, Any] | None = None) -> Iterator[Case]:
    """All transports × partitions with one mask, every way back and every dtype; or once each,
    where masks, ways back and dtypes take turns, and what is dealt goes straight with each mask."""
    heads, kv_heads = HEADS[size]
    strategies = [*itertools.product(NAMES, names(size))]
    if mask is not None:
        every = itertools.product(strategies, BACKWARDS[1:], DTYPES, [mask])
    else:
        strategies += [(BALANCED, "direct")] * len(ring_truth.MASKS)
        turns = (itertools.cycle(some) for some in (BACKWARDS, DTYPES, ring_truth.MASKS))
        every = zip(strategies, *turns, strict=False)  # type: ignore[assignment]
    for (partition, name), backward, dtype, seen in every:
        yield Case(
            partition, dtype, transport=name, backward=backward, heads=heads, kv_heads=kv_heads,
            **seen,
        )  # fmt: skip


def planned(case: Case, size: int, *, backward: bool, **more: Any) -> cost_model.Cost:
    """Returns the planner's cost; ``walk.Unwalkable`` if the case is impossible."""
    documents = case.cu and tuple(b - a for a, b in itertools.pairwise(case.cu))
    config = point(
        ring_size=size, seq_len=case.seq_len, batch=case.batch, heads=case.heads,
        kv_heads=case.kv_heads, head_dim=HEAD_DIM, dtype=_spoken(case.dtype), causal=case.causal,
        window=case.window, documents=documents, value_head_dim=case.value_dim,
        direction="forward+backward" if backward else "forward", partition=case.partition,
        transport=case.transport, backward=case.backward, **more,
    )  # fmt: skip
    prefix = (case.prefix,) if isinstance(case.prefix, int) else case.prefix
    mask = Mask(
        case.seq_len, case.causal, case.window, case.cu, case.chunk, prefix, case.global_tokens,
        case.shared_prefix,
    )  # fmt: skip
    vars(config.problem)["mask"] = mask  # a spec has one prefix for all documents
    return cost_model.predict(config, hardware.cpu(2))


def _spoken(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def walkable(case: Case, size: int) -> bool:
    try:
        planned(case, size, backward=True)
    except walk.Unwalkable:
        return False
    return True


def exact(rank: int, size: int, mask: dict[str, Any] | None = None) -> None:
    """Out, lse and gradients within the budget, whatever padding holds."""
    truths: dict[tuple[object, ...], ring_truth.Truth] = {}
    refused = 0
    for case in cases(size, mask):
        if not walkable(case, size):
            refused += 1
            q, k, v, _ = case.shards()
            with pytest.raises(ValueError, match=r"take 'planned'"):
                ringray.ring_attention(q.requires_grad_(), k, v, **case.arguments)
            continue
        key = (case.dtype, *case.mask.values(), case.cu)
        if key not in truths:
            truths[key] = ring_truth.truth(case)
        ring_truth.within_budget(case, rank, size, truths[key])
    assert refused, "some walks back are impossible"


def repeatable(rank: int, size: int) -> None:
    """Two runs are bitwise equal, and nothing depends on what padding holds."""
    ways = [("ring", backward) for backward in BACKWARDS[1:]]
    ways += [(name, "auto") for name in names(size)]
    for (name, backward), partition in zip(ways, itertools.cycle(NAMES), strict=False):
        case = Case(
            partition, torch.bfloat16, causal=False, transport=name, backward=backward,
            heads=HEADS[size][0], kv_heads=HEADS[size][1],
        )  # fmt: skip
        a, b, c = case.run(), case.run(), case.run(3.0)
        for tensor in a:
            assert torch.equal(a[tensor], b[tensor]), f"{case}: {tensor} differs between runs"
            assert torch.equal(a[tensor], c[tensor]), f"{case}: {tensor} depends on padding"


def traffic(rank: int, size: int) -> None:
    """Bytes and tensors sent, forward and backward, are the planner's; masks take turns."""
    ways = [*itertools.product(names(size), NAMES), *[("direct", BALANCED)] * len(TRAFFIC_MASKS)]
    for turn, (name, partition) in enumerate(ways):
        case = Case(
            partition, DTYPES[turn % 2], transport=name, backward=BACKWARDS[(turn + turn // 4) % 4],
            heads=HEADS[size][0], kv_heads=HEADS[size][1], value_dim=(None, 24, 8)[turn % 3],
            **TRAFFIC_MASKS[turn % len(TRAFFIC_MASKS)],
        )  # fmt: skip
        if not walkable(case, size):
            continue
        q, k, v, dout = case.shards()
        before = METER.snapshot()
        out = ringray.ring_attention(q.requires_grad_(), k, v, **case.arguments)
        there = METER.since(before)
        out.backward(dout)  # type: ignore[union-attr]
        both = METER.since(before)
        counts = torch.tensor([there.sent_bytes, there.messages, both.sent_bytes, both.messages])
        dist.all_reduce(counts)
        forward, whole = (planned(case, size, backward=x) for x in (False, True))
        assert counts.tolist() == [
            forward.sent_bytes, forward.messages, whole.sent_bytes, whole.messages
        ], (case, size)  # fmt: skip


def memory(rank: int, size: int) -> None:
    """The largest rank's peak is what the planner says, within 6%."""
    seq_len, heads = 2048, 8
    ways = [
        *itertools.product(transport.TRANSPORTS, (False, True), ("auto",), ("zigzag",)),
        *itertools.product(transport.TRANSPORTS, (True,), ("auto",), (BALANCED,)),
        ("ring", True, "query-side", "zigzag"),
    ]
    for name, backward, way, partition in ways:
        rows = seq_len // size
        q, k, v, dout = (torch.randn(1, heads, rows, 64, requires_grad=backward) for _ in range(4))

        def work(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, dout: Tensor = dout, name: str = name,
            backward: bool = backward, way: str = way, partition: str = partition,
        ) -> None:  # fmt: skip
            out = ringray.ring_attention(q, k, v, partition=partition, transport=name, backward=way)
            if backward:
                torch.autograd.grad(out, (q, k, v), dout)

        work()
        live = (4 if backward else 3) * q.numel() * q.element_size()
        peak = torch.tensor(live + peak_memory(work, torch.device("cpu")))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        config = point(
            ring_size=size, seq_len=seq_len, heads=heads, transport=name, partition=partition,
            direction="forward+backward" if backward else "forward", backward=way,
        )  # fmt: skip
        said = cost_model.predict(config, hardware.cpu(2))
        predicted = said.peak_memory_bytes
        assert predicted == pytest.approx(int(peak), rel=0.06), (
            name, backward, partition, predicted, peak,
        )  # fmt: skip


def refusals(rank: int, size: int) -> None:
    """Rings and heads that do not fit are refused on every rank, with the equation."""
    wrong = {
        "ulysses": (
            (7 * size, 7),
            f"an equal share of the heads, but 7 K/V heads / {size} ranks = {7 / size:.4g}",
        ),
        f"hybrid:{size + 1}": (
            (size, size),
            rf"{size + 1} \(Ulysses\) x {size / (size + 1):.4g} \(ring\) = {size} ranks does not",
        ),
        f"double-ring:{size + 1}": (
            (size, size),
            rf"{size / (size + 1):.4g} \(nodes\) x {size + 1} \(ranks per node\) = {size} ranks",
        ),
    }
    for name, ((heads, kv_heads), says) in wrong.items():
        case = Case("zigzag", seq_len=8 * size, transport=name, heads=heads, kv_heads=kv_heads)
        q, k, v, _ = case.shards()
        with pytest.raises(ValueError, match=says):
            ringray.ring_attention(q, k, v, **case.arguments)


EVERY = (exact, repeatable, traffic, refusals)


@pytest.mark.parametrize("size", [*exhaustive(2), 3, *exhaustive(4)])
def test_rings(size: int) -> None:
    on_ring(size, EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("size", [*exhaustive(2), 4])
def test_memory(size: int) -> None:
    on_ring(size, (memory,))


@pytest.mark.slow
def test_a_ring_of_eight() -> None:
    on_ring(8, (traffic, refusals, repeatable))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("mask", ring_truth.MASKS, ids=str)
def test_everything_by_everything(mask: dict[str, Any], size: int) -> None:
    on_ring(size, (partial(exact, mask=mask),))


def test_alone_every_transport_is_attention() -> None:
    """A ring of one computes locally through the same code."""
    assert "RANK" not in os.environ
    for name, backward in itertools.product(transport.TRANSPORTS, BACKWARDS):
        if name == "allgather" and backward not in ("auto", "planned"):
            continue
        case = Case("zigzag", transport=name, backward=backward)
        ring_truth.within_budget(case, 0, 1, ring_truth.truth(case))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rings", "expected one of ring, .* did you mean 'ring'"),
        ("ring:2", "'ring' takes no number"),
        ("hybrid:0", "expected hybrid:N with N the Ulysses degree"),
        ("double-ring:2.5", "expected double-ring:N with N the ranks per node"),
        ("", "expected one of ring"),
    ],
)
def test_names_that_mean_nothing(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        transport.plan(text, 4, 8, 8)


def test_every_module_says_what_it_is() -> None:
    for name, one in transport.TRANSPORTS.items():
        assert one.name == name
        for ranks in (1, 2, 6):
            found = one.exchange(ranks, None)
            assert all(route.ranks * found.fold == ranks for route in found.routes)
