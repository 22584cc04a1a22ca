"""The right results of a case on a real ring, by the oracle, and the comparison with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ringray
from ringray_kernels import testing
from tests.support import backend_problems
from tests.support.ranks import Case

MASKS: tuple[dict[str, Any], ...] = (
    {"causal": False},
    {},
    {"window": 0},
    {"window": 17},
    {"cu": (0, 5, 5, 30, 61)},
    {"causal": False, "cu": (0, 30, 61)},
    {"window": 9, "cu": (0, 1, 33, 61)},
    {"causal": False, "window": (3, 9), "cu": (0, 30, 61)},
    {"chunk": 7, "window": 4, "prefix": 11},
    {"prefix": (4, 0, 17), "cu": (0, 1, 33, 61)},
    {"global_tokens": 5, "window": 6},
    {"global_tokens": 3, "chunk": 9, "cu": (0, 1, 33, 61)},
    {"global_tokens": 7, "window": (4, 2), "causal": False},
    {"shared_prefix": 20, "cu": (0, 20, 33, 47, 61)},
    {"shared_prefix": 13, "cu": (0, 30, 61), "window": (4, 2), "causal": False},
)


class Truth(NamedTuple):
    """The right results of a case, by the oracle in fp64, and the yardstick of its budget."""

    want: testing.Gradients
    yard: testing.Gradients
    lse: Tensor
    dout: Tensor


def truth(case: Case) -> Truth:
    """The truth about ``case``, which no partition changes."""
    q, k, v, dout = case.inputs
    seen, scale = testing.visible(case.seq_len, **case.mask), case.factor
    want, yard = backend_problems.truth(
        case.inputs, seen, scale, causal=case.causal, **case.scoring
    )
    if case.with_dlse:  # whose part is as exact as the dtype
        both = testing.oracle(q, k, v, dout, seen, scale=scale, dlse=case.dlse, **case.scoring)
        parts = {
            name: getattr(yard, name) + (right - getattr(want, name)).to(q.dtype)
            for name, right in both._asdict().items()
            if name.startswith("d") and right is not None
        }
        want, yard = both, yard._replace(**parts)
    return Truth(want, yard, want.lse.float(), dout)


def within_budget(case: Case, rank: int, size: int, true: Truth) -> None:
    """Every tensor of ``case`` is right, and zero where a shard is padding."""
    got = case.run()
    want, yard, want_lse, dout = true
    padding = ringray.local_positions(case.dealt, case.seq_len, size, rank) >= case.seq_len
    for name, x in got.items():
        if name in ("dsinks", "dtable"):
            total = x.clone()
            if size > 1:
                dist.all_reduce(total)
            share = testing.sinks_share(total, getattr(want, name), getattr(yard, name))
            assert share <= 1, f"{case} on {size}: {name} takes {share:.3f} of its budget"
            continue
        full = ringray.unshard(x, dim=2, partition=case.dealt, seq_len=case.seq_len)
        if name == "lse":
            torch.testing.assert_close(full, want_lse, atol=2e-3, rtol=1e-4)
            assert (x[:, :, padding] == -torch.inf).all()
            continue
        share = testing.budget_share(full, getattr(want, name), getattr(yard, name), dout)
        assert share <= 1, f"{case} on {size}: {name} takes {share:.3f} of its budget"
        assert (x[:, :, padding] == 0).all(), f"{case}: {name} of padding"
