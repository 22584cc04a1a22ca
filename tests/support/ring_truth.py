"""The right results of a case on a real ring, by the oracle, and the comparison with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

import ringray
from ringray_kernels import testing

if TYPE_CHECKING:
    from torch import Tensor

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
    seen = testing.visible(case.seq_len, **case.mask)
    scale = case.factor
    want = testing.oracle(q, k, v, dout, seen, scale=scale, **case.scoring)
    sign = -1 if scale <= 0 else 1  # SDPA scales after masking
    yard = testing.yardstick(
        sign * q, k, v, dout, seen, scale=max(abs(scale), 1e-30), causal=case.causal,
        **case.scoring,
    )  # fmt: skip
    yard = yard._replace(dq=sign * yard.dq)  # type: ignore[operator]
    lse, more = _lse(q.double(), k.double(), seen, case)
    if case.with_dlse:
        want = want._replace(**{name: getattr(want, name) + x for name, x in more.items()})
        _, more = _lse(q, k, seen, case)
        yard = yard._replace(**{name: getattr(yard, name) + x for name, x in more.items()})
    return Truth(want, yard, lse.detach().float(), dout)


def _lse(q: Tensor, k: Tensor, seen: Tensor, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """lse and the gradients of q, k and the sinks from it, in the tensors' dtype."""
    leaves = {"dq": q, "dk": k}
    if case.sinks is not None:
        leaves["dsinks"] = case.sinks[:, None].expand(q.shape[:3])
    if case.table is not None:
        leaves["dtable"] = case.table[:, None].expand(*q.shape[:3], -1)
    leaves = {name: x.detach().to(q.dtype).requires_grad_() for name, x in leaves.items()}
    wide = leaves["dk"].repeat_interleave(case.heads // case.kv_heads, 1)
    scores = leaves["dq"] @ wide.transpose(-1, -2) * case.factor
    if (cap := case.softcap) is not None:
        scores = cap * torch.tanh(scores / cap)
    if case.slopes is not None:
        distance = torch.arange(q.shape[2]) - torch.arange(q.shape[2])[:, None]
        scores = scores - distance.abs() * case.slopes.to(q.dtype)[:, None, None]
    if case.reach is not None:
        away = torch.arange(q.shape[2]) - torch.arange(q.shape[2])[:, None]
        places = away.clamp(-case.reach, case.reach) + case.reach
        scores = scores + leaves["dtable"].gather(-1, places.expand_as(scores))
    lse = torch.logsumexp(scores.masked_fill(~seen, -torch.inf), -1)
    if case.with_sinks:
        lse = torch.logaddexp(lse, leaves["dsinks"])
    found = torch.autograd.grad(lse, list(leaves.values()), case.dlse.to(q.dtype))
    return lse, dict(zip(leaves, found, strict=True))


def within_budget(case: Case, rank: int, size: int, true: Truth) -> None:
    """Every tensor of ``case`` is right, and zero where a shard is padding."""
    got = case.run()
    want, yard, want_lse, dout = true
    padding = ringray.local_positions(case.partition, case.seq_len, size, rank) >= case.seq_len
    for name, x in got.items():
        if name in ("dsinks", "dtable"):
            total = x.clone()
            if size > 1:
                dist.all_reduce(total)
            share = testing.sinks_share(total, getattr(want, name), getattr(yard, name))
            assert share <= 1, f"{case} on {size}: {name} takes {share:.3f} of its budget"
            continue
        full = ringray.unshard(x, dim=2, partition=case.partition, seq_len=case.seq_len)
        if name == "lse":
            torch.testing.assert_close(full, want_lse, atol=2e-3, rtol=1e-4)
            assert (x[:, :, padding] == -torch.inf).all()
            continue
        share = testing.budget_share(full, getattr(want, name), getattr(yard, name), dout)
        assert share <= 1, f"{case} on {size}: {name} takes {share:.3f} of its budget"
        assert (x[:, :, padding] == 0).all(), f"{case}: {name} of padding"
