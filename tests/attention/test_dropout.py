"""Dropout of attention weights: by seed and global position alone."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import ringray
from ringray import transport
from ringray.lab.kinds import correctness
from ringray.lab.kinds.base import RankContext
from ringray.partition import PARTITIONS
from ringray.traffic import walk
from ringray_kernels import dropout, testing
from ringray_kernels.dropout import Dropout, factors
from tests.support.compile_checks import compiled, same_bits
from tests.support.exhaustive import exhaustive
from tests.support.point import point
from tests.support.ranks import Case, on_ring
from tests.support.ring_truth import MASKS, truth, within_budget


def exact(rank: int, size: int) -> None:
    """Transports, partitions and walks back in turns: the weights that one process drops."""
    shape = {"heads": 4 * size, "kv_heads": 2 * size, "batch": 2, "seq_len": 61}
    ways = zip(
        [*transport.TRANSPORTS, "allgather:2"] * 2, itertools.cycle([*PARTITIONS, "striped"]),
        itertools.cycle(["auto", *walk.BACKWARDS]), strict=False,
    )  # fmt: skip
    truths = {"aten": truth(Case("zigzag", dropout_p=0.3, **shape))}
    truths["reference"] = truth(Case("zigzag", dropout_p=0.3, **shape, **MASKS[6]))
    for turn, (way, partition, backward) in enumerate(ways):
        backend, mask = (("aten", {}), ("reference", MASKS[6]))[turn % 2]
        case = Case(
            partition, dropout_p=0.3, transport=way, backward=backward, backend=backend, **shape,
            **mask,
        )  # fmt: skip
        with contextlib.suppress(walk.Unwalkable):
            within_budget(case, rank, size, truths[backend])


def with_the_rest(rank: int, size: int) -> None:
    """Beside sinks, a softcap, another head dim of v and gradients of lse."""
    for number, way in enumerate(("ring", "ulysses", "allgather")):
        case = Case(
            list(PARTITIONS)[number], transport=way, dropout_p=0.6, with_sinks=True, with_dlse=True,
            softcap=0.7, value_dim=24, heads=2 * size, kv_heads=size, prefix=9,
        )  # fmt: skip
        within_budget(case, rank, size, truth(case))


def seeds(rank: int, size: int) -> None:
    """Seeds come from torch's generator; where ranks draw others, or have them, all say so."""
    case = Case("zigzag", dropout_p=0.5, heads=4, kv_heads=2)
    q, k, v, _ = case.shards(0.0)
    drawn = case.arguments | {"dropout_seed": None}
    torch.manual_seed(3)
    first, second = (ringray.ring_attention(q, k, v, **drawn) for _ in range(2))
    assert not torch.equal(first, second)  # type: ignore[arg-type]
    torch.manual_seed(3)
    assert torch.equal(ringray.ring_attention(q, k, v, **drawn), first)  # type: ignore[arg-type]
    if size == 1:
        return
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match=r"problem: dropout_seed: .*; give the same .*manual_seed"):
        ringray.ring_attention(q, k, v, **drawn)
    seeds_of_ranks: dict[str, tuple[dict[str, Any], str]] = {
        "dropout_seed: ": ({}, "dropout_seed: 5"),
        "dropout_p: ": ({"dropout_p": 0.0}, "dropout_p: "),
        "refused": ({"dropout_p": 1.0}, "dropout_p: got 1.0, expected a number of at least 0"),
    }
    for others, (changes, own) in seeds_of_ranks.items():
        last = rank == size - 1
        arguments = case.arguments | ({"dropout_seed": 5} | changes if last else {})
        with pytest.raises(ValueError, match=own if last else others):
            ringray.ring_attention(q, k, v, **arguments)
    torch.manual_seed(3)
    assert torch.equal(ringray.ring_attention(q, k, v, **drawn), first)  # type: ignore[arg-type]


def under_torch_compile(rank: int, size: int) -> None:
    """The same bits, with every gradient, for seeds that are drawn."""
    case = Case("zigzag", dropout_p=0.3, heads=4 * size, kv_heads=2 * size)
    results: list[list[Tensor]] = []
    for function in (_twice, compiled(_twice)):
        *qkv, dout = case.shards()
        leaves = [x.requires_grad_() for x in qkv]
        torch.manual_seed(1)
        outs = function(*leaves, **case.arguments | {"dropout_seed": None})
        torch.autograd.backward(outs, (dout, dout))
        results.append([*outs, *(x.grad for x in leaves)])  # type: ignore[misc]
    same_bits(*results, case)
    assert not torch.equal(*results[0][:2])


def _twice(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, ...]:
    first, second = (ringray.ring_attention(q, k, v, **more) for _ in range(2))
    return first, second  # type: ignore[return-value]


@pytest.mark.parametrize("size", [*exhaustive(1, 2), 3, *exhaustive(4)])
def test_every_ring_drops_what_one_process_drops(size: int) -> None:
    on_ring(size, (exact, with_the_rest, seeds, under_torch_compile))


def test_philox_gives_the_numbers_that_its_authors_publish() -> None:
    """Random123's known answers for philox4x32 with 7 rounds."""
    word = 0xFFFFFFFF
    for counter, key, want in (
        ((0, 0, 0, 0), (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((word,) * 4, (word,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ):  # fmt: skip
        got = dropout._philox(tuple(map(torch.tensor, counter)), key)
        assert " ".join(f"{int(x):08x}" for x in got) == want


def test_weights_stay_at_the_rate_that_was_asked_for_and_independently() -> None:
    positions = torch.arange(192)
    heads, batch = torch.arange(8), torch.arange(2)[:, None]
    for p in (0.1, 0.5, 0.9):
        stays = (factors(Dropout(p, 11), batch, heads, positions, positions) > 0).double()
        spread = (p * (1 - p) / stays.numel()) ** 0.5
        assert abs(float(stays.mean()) - (1 - p)) < 4 * spread
        centred = stays - stays.mean()
        for shift, dim in ((1, 3), (2, 3), (3, 3), (4, 3), (1, 2), (1, 1), (1, 0)):
            pairs = float((centred * centred.roll(shift, dim)).mean()) / (p * (1 - p))
            assert abs(pairs) < 5 / stays.numel() ** 0.5, (p, shift, dim)
        other = (
            factors(Dropout(p, 11 + (1 << 32)), batch, heads, positions, positions) > 0
        ).double()
        assert abs(float((centred * (other - 1 + p)).mean())) < 5 * spread


def test_without_probability_nothing_changes() -> None:
    q, k, v, _ = testing.make_inputs(1, 4, 2, 62, 16, torch.float32, seed=0)
    state = torch.get_rng_state()
    plain, none = (ringray.ring_attention(q, k, v, **more) for more in ({}, {"dropout_p": 0}))
    assert torch.equal(plain, none)  # type: ignore[arg-type]
    assert torch.equal(state, torch.get_rng_state())


def test_positions_have_32_bits() -> None:
    q = torch.zeros(1, 1, 1, 1).expand(1, 1, (1 << 31) + 2, 1)
    with pytest.raises(
        ValueError, match="dropout_p: got 2147483650 positions, expected at most 2147483648"
    ):
        ringray.ring_attention(q, q, q, dropout_p=0.1)


def test_the_correctness_kind_knows_what_is_dropped() -> None:
    config = point(
        dropout_p=0.3, seed=3, heads=4, seq_len=61, head_dim=16, partition="striped"
    )  # fmt: skip
    measured = correctness.run(config, RankContext(0, torch.device("cpu"), None))
    assert not measured.failure
    assert max(measured.errors.values()) <= 1
