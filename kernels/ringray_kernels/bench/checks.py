"""Checks before timing: sampled rows of every result against attention computed by definition.

Shape legend: R some query rows, K a range of keys, S rows, D head dim; all of one batch entry.
Computations run in chunks, so that 128k tokens fit, in fp64 or (long 16-bit problems) fp32.

Sampled query rows of the first and the last query head give out and dq. dk and dv of sampled keys
of the last key/value head sum over all rows of its query heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringray_kernels.bench.problems import Inputs, Point

_RANDOM_ROWS = 96
_ELEMENTS = 1 << 25  # of one chunk of scores
_FP64_ROWS = 16 * 1024  # longer 16-bit problems are checked in fp32, thousands of times finer
_FP32_LIMIT = 2e-5  # of relative errors
_HALF_LIMIT = 1.5  # in eps of the dtype: 1.2% for bf16; GPU kernels reach a third of it
_EIGHT_BITS_LIMIT = 0.07  # against q, k and v before they are rounded, which gives 0.05


class Sample(NamedTuple):
    """The right values (heads, rows, D) of one tensor, and the indices of heads and rows."""

    want: Tensor
    heads: tuple[int, ...]
    rows: Tensor


Reference = Mapping[str, Sample]  # by name of the tensor


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    ``errors``: by tensor, relative to the norm; ``share``: the largest one over the limit, at most
    1 if right; ``reason``: the mistake, or None.
    """

    errors: dict[str, float]
    share: float
    reason: str | None


def sampled_rows(point: Point, device: torch.device) -> Tensor:
    """Returns sorted rows: random ones, the ends, both sides of tile and document boundaries."""
    generator = torch.Generator().manual_seed(point.seq_len)
    chosen = set(torch.randint(point.seq_len, (_RANDOM_ROWS,), generator=generator).tolist())
    edges = {0, 64, 128, point.seq_len, *(point.boundaries or ())}
    chosen |= {row for edge in edges for row in (edge - 1, edge)}
    legal = sorted(row for row in chosen if 0 <= row < point.seq_len)
    return torch.tensor(legal, device=device)


class _Attention(NamedTuple):
    """The definition, in the precision of the check. ``low``, ``high``: keys that each row sees."""

    point: Point
    inputs: Inputs
    dtype: torch.dtype
    low: Tensor
    high: Tensor

    def rows(self, head: int, rows: Tensor, first: int, stop: int) -> tuple[Tensor, ...]:
        """Computes out and dq (R, D) of some rows of a query head, which see keys of ``[first,
        stop)`` only, and their part of dk and dv (K, D) of these keys."""
        kv_head = head // (self.point.heads // self.point.kv_heads)
        q, dout = (x[0, head, rows].to(self.dtype) for x in (self.inputs.q, self.inputs.dout))
        k, v = (x[0, kv_head, first:stop].to(self.dtype) for x in (self.inputs.k, self.inputs.v))
        keys = torch.arange(first, stop, device=q.device)
        seen = (keys >= self.low[rows, None]) & (keys < self.high[rows, None])
        scores = (q @ k.T * self.point.scale).masked_fill_(~seen, -math.inf)
        weights = torch.softmax(scores, -1)
        out = weights @ v
        delta = (dout * out).sum(-1, keepdim=True)
        dscores = weights * (dout @ v.T - delta) * self.point.scale
        return out, dscores @ k, dscores.T @ q, weights.T @ dout

    def key_gradients(self, kv_head: int) -> tuple[Tensor, Tensor]:
        """Computes dk and dv (S, D) of a key/value head, by chunks of query rows of all heads that
        share it."""
        length, group = self.point.seq_len, self.point.heads // self.point.kv_heads
        shape, device = (length, self.point.head_dim), self.low.device
        dk, dv = (torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2))
        step = max(1, _ELEMENTS // length)
        for rows in torch.arange(length, device=device).split(step):
            # Ranges move forward with the rows: a chunk sees no key outside of these.
            first, stop = int(self.low[rows[0]]), int(self.high[rows[-1]])
            for head in range(kv_head * group, (kv_head + 1) * group):
                _, _, dk_part, dv_part = self.rows(head, rows, first, stop)
                dk[first:stop] += dk_part
                dv[first:stop] += dv_part
        return dk, dv


@torch.no_grad()
def reference(point: Point, inputs: Inputs) -> Reference:
    """Computes the right results of ``point`` (forward: out; backward: dq, dk, dv)."""
    coarse = point.is_half and point.seq_len > _FP64_ROWS
    dtype = torch.float32 if coarse else torch.float64
    attention = _Attention(point, inputs, dtype, *point.visible(inputs.q.device))
    rows = sampled_rows(point, inputs.q.device)
    query_heads = tuple(sorted({0, point.heads - 1}))
    by_head = [attention.rows(head, rows, 0, point.seq_len) for head in query_heads]
    out, dq = (torch.stack([results[i] for results in by_head]) for i in range(2))
    if point.direction == "forward":
        return {"out": Sample(out, query_heads, rows)}
    kv_head = point.kv_heads - 1
    dk, dv = (x[rows][None] for x in attention.key_gradients(kv_head))
    return {
        "dq": Sample(dq, query_heads, rows),
        "dk": Sample(dk, (kv_head,), rows),
        "dv": Sample(dv, (kv_head,), rows),
    }


def relative_error(got: Tensor, want: Tensor) -> float:
    """Returns the norm of got - want over that of want, with rows scaled to about one size.

    Unscaled, early rows of a causal problem are a hundred times larger than late ones and would
    hide their errors. Rows below the median are scaled like the median, because an exact gradient
    may be 0.
    """
    got, want = got.double().flatten(0, -2), want.double().flatten(0, -2)
    norms = want.norm(dim=-1, keepdim=True)
    sizes = norms.clamp_min(float(norms.median())).clamp_min(1e-30)
    return float(((got - want) / sizes).norm() / (want / sizes).norm().clamp_min(1e-30))


def check(
    results: Mapping[str, Tensor], right: Reference, dtype: torch.dtype, *, quantized: bool = False
) -> CheckResult:
    """Checks that ``results`` (by name, (1, heads, S, D)) are finite, and right in the sample.
    ``quantized``: of q, k and v in 8 bits.

    Raises:
        KeyError: a result is missing.
    """
    limit = _FP32_LIMIT if dtype == torch.float32 else _HALF_LIMIT * torch.finfo(dtype).eps
    limit = _EIGHT_BITS_LIMIT if quantized else limit
    errors: dict[str, float] = {}
    wrong: list[str] = []
    for name, (want, heads, rows) in right.items():
        got = results[name]
        errors[name] = relative_error(torch.stack([got[0, head, rows] for head in heads]), want)
        if not bool(torch.isfinite(got).all()):
            errors[name] = math.inf
            wrong.append(f"{name} is not finite everywhere")
        elif not errors[name] <= limit:
            wrong.append(f"{name} is off by {errors[name]:.1e}, limit {limit:.1e}")
    worst = max(errors.values())
    return CheckResult(errors, worst / limit, "; ".join(wrong) or None)
