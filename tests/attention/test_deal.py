"""``ringray.deal``: its arguments and what it returns; on real rings, whoever takes one."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import ringray
from ringray.partition import PARTITIONS
from tests.support import deal_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

EVERY = (
    checks.mistakes_are_told,
    checks.deals_outlive_their_callers,
    checks.lists_of_pytorch,
    checks.layers_agree,
)


@pytest.mark.parametrize("size", [*exhaustive(2), 3, *exhaustive(4)])
def test_rings(size: int) -> None:
    on_ring(size, (*EVERY, checks.ranks_learn))


# In one process, without a group

CUTS = (0, 100, 700, 1000)


@pytest.mark.parametrize(
    "weights",
    [
        [0, 1], [-1, 1], [float("nan"), 1], [float("inf"), 1], [10**400, 1], [1e308, 1], ["1", "2"],
        [True, 1], [None, 1], [1], [1, 2, 3], [[1, 2]], "12", 3, torch.ones(1, 2),
    ],
    ids=str,
)  # fmt: skip
def test_weights_are_a_positive_number_for_each_rank(weights: Any) -> None:
    assert ringray.deal(16, 2, weights=[1, 2])  # True and 1 are equal, and looked up
    with pytest.raises(ValueError, match=r"weights: got .*, expected a positive number for each"):
        ringray.deal(16, 2, weights=weights)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seq_len": 0}, "seq_len: got 0, expected an integer of at least 1"),
        ({"seq_len": "16"}, "seq_len: got '16', expected"),
        ({"seq_len": True}, "seq_len: got True, expected"),
        ({"world_size": 2.0}, "world_size: got 2.0, expected an integer of at least 1"),
        ({"world_size": None}, "world_size: got None, expected"),
        ({"cu_seqlens": [0, 8]}, r"cu_seqlens: expected boundaries .* \(16\), got \(0, 8\)"),
        ({"cu_seqlens": [0, 9, 8, 16]}, "cu_seqlens: boundaries must not decrease"),
        ({"cu_seqlens": [0, 8.5, 16]}, "cu_seqlens: got .*, expected integers"),
        ({"window": 3, "causal": False}, "window: got 3 without causal"),
        ({"causal": 1}, "causal: got 1, expected True or False"),
        ({"prefix": [3, 4]}, r"prefix: got \(3, 4\), expected"),
        ({"partition": "zigzg"}, "partition: got 'zigzg', .* did you mean 'zigzag'"),
        ({"partition": None}, "partition: got None, expected a name, or each of the positions"),
        ({"partition": [*range(15)]}, "partition: got .*, expected .* 0 to 15 once: 16 tokens"),
        ({"partition": [*range(20)]}, "partition: got .*, expected .* 0 to 15 once: 16 tokens"),
        ({"partition": [0, *range(15)]}, "partition: got .*, expected a name, or each"),
        ({"partition": [0.5] * 16}, "partition: got .*, expected a name, or each"),
        ({"partition": [[1], [2, 3]]}, r"partition: got \[\[1\], \[2, 3\]\], expected a name"),
        ({"partition": torch.arange(16).expand(2, -1)}, "partition: got .*, expected a name"),
        ({"partition": [*range(9), 10, 9, *range(11, 16)]},
         r"got \[8, 10, 9, .*\] for rank 1, expected .* in ascending order; sort each part"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_told(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ringray.deal(**{"seq_len": 16, "world_size": 2, **changes})


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    want = ringray.deal(16, 2, cu_seqlens=[0, 5, 16], window=3, weights=[1, 2])
    for number, array in ((np.int64, np.array), (np.int32, np.array), (torch.tensor, torch.tensor)):
        got = ringray.deal(
            number(16), number(2), cu_seqlens=array([0, 5, 16]), window=number(3),
            weights=array([1.0, 2.0]),
        )  # fmt: skip
        assert got == want


def test_a_copy_is_equal_and_another_deal_is_not() -> None:
    deal = ringray.deal(1000, 4, cu_seqlens=CUTS)
    for same in (pickle.loads(pickle.dumps(deal)), copy.deepcopy(deal)):
        assert same == deal
        assert {same: 1}[deal] == 1
        assert (same.dealt, same.balance, same.rows_received) == (
            deal.dealt, deal.balance, deal.rows_received,
        )  # fmt: skip
    others = (
        ringray.deal(1000, 4), ringray.deal(1000, 5, cu_seqlens=CUTS),
        ringray.deal(1000, 4, cu_seqlens=CUTS, weights=[1, 1, 1, 2]),
        ringray.deal(1000, 4, cu_seqlens=CUTS, window=2000),
    )  # fmt: skip
    assert deal not in others
    assert len({deal, *others}) == 5
    with pytest.raises(AttributeError):
        deal.seq_len = 3  # type: ignore[misc]


def test_processes_deal_alike() -> None:
    """Whatever the seed of their hashes."""
    code = f"import ringray; d = ringray.deal(1000, 4, cu_seqlens={CUTS}); print(hash(d), d.dealt)"
    deal = ringray.deal(1000, 4, cu_seqlens=CUTS)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == f"{hash(deal)} {deal.dealt}"


@pytest.mark.parametrize("name", ["balanced", *PARTITIONS])
def test_lists_of_indices_come_back(name: str) -> None:
    """As lists, arrays or tensors, also of one row; padding included."""
    for seq_len in (1000, 997):
        mask = {"cu_seqlens": (0, 100, 700, seq_len)}
        deal = ringray.deal(seq_len, 4, partition=name, **mask)
        indices = deal.indices()
        for same in (indices, np.array(indices), torch.tensor([indices], dtype=torch.int32)):
            back = ringray.deal(seq_len, 4, partition=same, **mask)
            rows = (sorted(itertools.chain(*back.ranges(rank))) for rank in range(4))
            assert list(itertools.chain(*rows)) == indices
            assert back.padded == deal.padded
            assert (back.balance, back.work) == (deal.balance, deal.work)
            assert name != "balanced" or back.dealt == deal.dealt
    heavy = ringray.deal(seq_len, 4, partition=indices, weights=[1, 1, 1, 9])
    assert heavy.balance < 0.5


def test_ranks_and_documents_of_a_deal() -> None:
    deal = ringray.deal(3, 4, cu_seqlens=[0, 1, 3])
    documents = [deal.documents(rank) for rank in range(4)]
    assert sorted(documents) == [(), (0,), (1,), (1,)]  # one rank holds padding alone
    assert deal.balance == 0.5  # 4 visible pairs on 4 ranks, of which one query has 2
    for rank in (4, -1, "0", None):
        with pytest.raises(ValueError, match=f"rank: got {rank!r}, expected 0 to 3"):
            deal.ranges(rank)  # type: ignore[arg-type]
