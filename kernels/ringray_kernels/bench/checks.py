"""Checks before timing: sampled rows of every result against attention computed by definition.

Shape legend: R sampled query rows, K sampled key rows, S rows, D head dim; all of one batch entry.
Computations run in chunks, so that 128k tokens fit, in fp64 or (long 16-bit problems) fp32.

Sampled query rows of the first and the last query head give out and dq. dk and dv of sampled keys
of the last key/value head sum over all queries, and so need lse and delta of every row of its query
heads.
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
class Verdict:
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


class _Heads:
    """The inputs by head, in the precision of the check."""

    def __init__(self, point: Point, inputs: Inputs) -> None:
        self.point = point
        self.inputs = inputs
        coarse = point.is_half and point.seq_len > _FP64_ROWS
        self.dtype = torch.float32 if coarse else torch.float64
        self.low, self.high = point.visible(inputs.q.device)
        self.positions = torch.arange(point.seq_len, device=inputs.q.device)
        self.group = point.heads // point.kv_heads

    def query(self, head: int) -> tuple[Tensor, Tensor]:
        """Returns q and dout (S, D) of a query head."""
        return self.inputs.q[0, head].to(self.dtype), self.inputs.dout[0, head].to(self.dtype)

    def key(self, kv_head: int) -> tuple[Tensor, Tensor]:
        """Returns k and v (S, D) of a key/value head."""
        return self.inputs.k[0, kv_head].to(self.dtype), self.inputs.v[0, kv_head].to(self.dtype)

    def scores(self, q: Tensor, k: Tensor, rows: Tensor | slice, keys: Tensor) -> Tensor:
        """Returns scores of ``rows`` q (R, D) and k (K, D) at positions ``keys``; unseen pairs are
        -inf."""
        seen = (keys >= self.low[rows, None]) & (keys < self.high[rows, None])
        return (q @ k.T * self.point.scale).masked_fill_(~seen, -math.inf)

    def rows(self, head: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Computes out and dq (R, D) of some query rows."""
        (q, dout), (k, v) = self.query(head), self.key(head // self.group)
        scores = self.scores(q[rows], k, rows, self.positions)
        weights = torch.softmax(scores, -1)
        out = weights @ v
        delta = (dout[rows] * out).sum(-1, keepdim=True)
        dscores = weights * (dout[rows] @ v.T - delta)
        return out, dscores @ k * self.point.scale

    def statistics(self, head: int) -> tuple[Tensor, Tensor]:
        """Computes lse and delta (S,) of all rows of a query head, by chunks of rows."""
        (q, dout), (k, v) = self.query(head), self.key(head // self.group)
        lse, delta = (torch.empty(len(q), dtype=self.dtype, device=q.device) for _ in range(2))
        step = max(1, _ELEMENTS // len(k))
        bounds = range(0, len(q), step)
        # Ranges move forward with the rows: a chunk sees no key outside of these.
        first = self.low[list(bounds)].tolist()
        last = self.high[[min(start + step, len(q)) - 1 for start in bounds]].tolist()
        for start, a, b in zip(bounds, first, last, strict=True):
            part = slice(start, start + step)
            scores = self.scores(q[part], k[a:b], part, self.positions[a:b])
            lse[part] = torch.logsumexp(scores, -1)
            out = torch.exp(scores - lse[part, None]) @ v[a:b]
            delta[part] = (dout[part] * out).sum(-1)
        return lse, delta

    def keys(self, kv_head: int, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Computes dk and dv (K, D) of some key rows, summed over the queries of all heads that
        share them, by chunks of queries."""
        k, v = self.key(kv_head)
        k, v = k[keys], v[keys]
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for head in range(kv_head * self.group, (kv_head + 1) * self.group):
            q, dout = self.query(head)
            lse, delta = self.statistics(head)
            step = max(1, _ELEMENTS // len(keys))
            for start in range(0, len(q), step):
                part = slice(start, start + step)
                scores = self.scores(q[part], k, part, keys)
                weights = torch.exp(scores - lse[part, None])
                dv += weights.T @ dout[part]
                dscores = weights * (dout[part] @ v.T - delta[part, None])
                dk += dscores.T @ q[part] * self.point.scale
        return dk, dv


@torch.no_grad()
def reference(point: Point, inputs: Inputs) -> Reference:
    """Computes the right results of ``point`` (forward: out; backward: dq, dk, dv)."""
    heads = _Heads(point, inputs)
    rows = sampled_rows(point, inputs.q.device)
    query_heads = tuple(sorted({0, point.heads - 1}))
    kv_heads = (point.kv_heads - 1,)
    by_head = [heads.rows(head, rows) for head in query_heads]
    out, dq = (torch.stack(part) for part in zip(*by_head, strict=True))
    if point.direction == "forward":
        return {"out": Sample(out, query_heads, rows)}
    dk, dv = heads.keys(kv_heads[0], rows)
    return {
        "dq": Sample(dq, query_heads, rows),
        "dk": Sample(dk[None], kv_heads, rows),
        "dv": Sample(dv[None], kv_heads, rows),
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
) -> Verdict:
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
    return Verdict(errors, worst / limit, "; ".join(wrong) or None)
