"""Dropout of attention weights: by seed and global position alone."""

from __future__ import annotations

import pytest
import torch

import ringray
from ringray.lab.kinds import correctness
from ringray.lab.kinds.base import RankContext
from ringray_kernels import dropout, testing
from ringray_kernels.dropout import Dropout, factors
from tests.support import dropout_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.point import point
from tests.support.ranks import on_ring


@pytest.mark.parametrize("size", [*exhaustive(1, 2), 3, *exhaustive(4)])
def test_every_ring_drops_what_one_process_drops(size: int) -> None:
    on_ring(size, (checks.exact, checks.with_the_rest, checks.seeds, checks.under_torch_compile))


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


def test_checkpoints_drop_the_same_weights_again() -> None:
    q, k, v, dout = testing.make_inputs(1, 2, 2, 62, 16, torch.float32, seed=0)
    q.requires_grad_()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return ringray.ring_attention(q, k, v, dropout_p=0.5) * 1.0  # type: ignore[return-value]

    found = []
    for run in (
        attend,
        lambda q: torch.utils.checkpoint.checkpoint(attend, q, use_reentrant=False),
    ):
        torch.manual_seed(5)
        found.append(torch.autograd.grad(run(q), q, dout)[0])
    assert torch.equal(*found)


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
