"""The virtual ring: the hops of N ranks in sequence on one device.

It computes a ring of N devices without its transfers: the kernel calls of all ranks with the
intervals and order of the ring. It gives two numbers. *Overhead*: the sum of all hop times over one
call for the whole sequence, the cost of the division into hops. *Critical path*: the time of the
slowest rank over that call, at best 1/N.

The function named by ``HOPS`` provides the hops; the kernels install and run without it. Shapes as
in ``problems``; a shard has S / N rows.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import ringray_kernels
from ringray_kernels.api import State
from ringray_kernels.bench import checks, measure, problems, timing
from ringray_kernels.bench.contenders import Ringray
from ringray_kernels.bench.measure import Record
from ringray_kernels.bench.problems import DIRECTIONS, Direction, Inputs, Point, VirtualPoint
from ringray_kernels.bench.timing import Clock

_ROUNDS = 5
HOPS = "ringray.attention.virtual:hops"  # MODULE:FUNCTION that returns the hops of a rank


class _Hop(NamedTuple):
    """One kernel call of one rank: rows of the owner's chunk, and the intervals of its queries."""

    owner: int
    rows: slice
    start: Tensor
    end: Tensor


@dataclass
class _Rank:
    """A rank's positions in the sequence, its shard, its hops in each pass, and its results so far.
    ``grads``: of its shard's q, k and v, fp32."""

    positions: Tensor
    shard: Inputs
    forward: list[_Hop]
    backward: list[_Hop]
    state: State = field(init=False)
    delta: Tensor = field(init=False)
    grads: list[Tensor] = field(init=False)


class VirtualRing:
    """All ranks of one virtual ring."""

    def __init__(self, point: VirtualPoint, inputs: Inputs, backend: str) -> None:
        self.inputs = inputs
        self.device = inputs.q.device
        self.more: dict[str, Any] = {"scale": point.whole.scale, "backend": backend}
        self.ranks = [self._rank(point, rank, backend) for rank in range(point.world_size)]

    def _rank(self, point: VirtualPoint, rank: int, backend: str) -> _Rank:
        hops = pkgutil.resolve_name(HOPS)
        dealt, forward, backward = hops(point, rank, backend, *self.inputs[:2])
        shard = Inputs(*(x[:, :, dealt] for x in self.inputs))
        return _Rank(dealt, shard, [_Hop(*h) for h in forward], [_Hop(*h) for h in backward])

    def _cut(self, hop: _Hop) -> tuple[Tensor, Tensor]:
        shard = self.ranks[hop.owner].shard
        return shard.k[:, :, hop.rows], shard.v[:, :, hop.rows]

    def forward(self, clock: Clock) -> None:
        """Runs the forward hops of all ranks and times each call."""
        for rank in self.ranks:
            clock.head_start()
            state: State | None = None
            for hop in rank.forward:
                q, out_dtype = rank.shard.q, rank.shard.q.dtype if hop is rank.forward[-1] else None
                operands = q, *self._cut(hop), hop.start, hop.end
                options = {"state": state, "out_dtype": out_dtype, **self.more}
                state = clock.time(ringray_kernels.forward, *operands, **options)
            assert state is not None
            rank.state = state

    def prepare_backward(self) -> None:
        """Computes delta and zeroes the gradients, after the last forward."""
        backend = self.more["backend"]
        for rank in self.ranks:
            rank.delta = ringray_kernels.delta(rank.shard.dout, *rank.state, backend=backend)
            rank.grads = [
                torch.zeros(x.shape, dtype=torch.float32, device=self.device)
                for x in rank.shard[:3]
            ]

    def backward(self, clock: Clock) -> None:
        """Runs the backward hops of all ranks and times each call.

        Ranks add dK and dV to their owner's; a real ring sends the sums.
        """
        for rank in self.ranks:
            clock.head_start()
            for hop in rank.backward:
                dk, dv = (x[:, :, hop.rows] for x in self.ranks[hop.owner].grads[1:])
                sums = {"dq": rank.grads[0], "dk": dk, "dv": dv}
                (q, _, _, dout), (out, lse) = rank.shard, rank.state
                operands = dout, q, *self._cut(hop), lse, rank.delta, hop.start, hop.end
                clock.time(ringray_kernels.backward, *operands, out=out, **sums, **self.more)

    def assembled(self, direction: Direction) -> dict[str, Tensor]:
        """Returns the results of the whole sequence, in q's dtype."""

        def whole(parts: list[Tensor]) -> Tensor:
            like = parts[0]
            shape = (*like.shape[:2], self.inputs.q.shape[2], like.shape[3])
            result = torch.empty(shape, dtype=self.inputs.q.dtype, device=self.device)
            for rank, part in zip(self.ranks, parts, strict=True):
                result[:, :, rank.positions] = part.to(result.dtype)
            return result

        if direction == "forward":
            return {"out": whole([rank.state.out for rank in self.ranks])}
        names = ("dq", "dk", "dv")
        return {n: whole([rank.grads[i] for rank in self.ranks]) for i, n in enumerate(names)}


@lru_cache(maxsize=1)
def _inputs(whole: Point, device: torch.device) -> tuple[Inputs, dict[Direction, checks.Reference]]:
    """Returns the inputs and references that consecutive rings of a length share."""
    inputs = problems.make_inputs(whole, device, 0)
    right = {way: checks.reference(replace(whole, direction=way), inputs) for way in DIRECTIONS}
    return inputs, right


class VirtualBench:
    """Measurements of virtual rings."""

    def __init__(self, device: torch.device, peak: float | None, rounds: int = _ROUNDS) -> None:
        self.device, self.peak, self.rounds = device, peak, rounds
        self.backend = Ringray().backend_on(device)

    def measure(self, point: VirtualPoint, say: Callable[[str], None]) -> list[Record]:
        """Returns two records, forward and backward; ``median_ms`` is the sum of all hops.

        Raises:
            DeviceLost: this process can measure no more.
        """
        records: list[Record] = []
        try:
            say("inputs and reference")
            inputs, right = _inputs(point.whole, self.device)
            say("checking every rank's hops")
            ring = VirtualRing(point, inputs, self.backend)
            clock = Clock(self.device)
            # A ring of one rank computes the same problem in one call.
            whole = VirtualRing(replace(point, world_size=1), inputs, self.backend)
            for direction in DIRECTIONS:
                verdicts = []
                for ranks in (ring, whole):
                    if direction == "backward":
                        ranks.prepare_backward()
                    getattr(ranks, direction)(clock)
                    results = ranks.assembled(direction)
                    verdicts.append(checks.check(results, right[direction], inputs.q.dtype))
                clock.milliseconds()
                case, (verdict, once) = point.name(direction), verdicts
                if verdict.reason or once.reason:
                    reason = verdict.reason or f"in one call: {once.reason}"
                    errors, share = verdict.errors, max(verdict.share, once.share)
                    records.append(
                        Record(case, "ringray", "wrong", reason, share=share, errors=errors)
                    )
                    continue
                say(f"timing {direction}")
                records.append(self._timed(point, direction, ring, whole, clock, verdict))
        except Exception as error:  # of any type: other rings go on
            records += [
                measure.failure(point.name(direction), "ringray", error)
                for direction in DIRECTIONS[len(records) :]
            ]
        ring = whole = None  # type: ignore[assignment]
        measure.free(self.device, records)
        return records

    def _timed(
        self,
        point: VirtualPoint,
        direction: Direction,
        ring: VirtualRing,
        whole: VirtualRing,
        clock: Clock,
        verdict: checks.CheckResult,
    ) -> Record:
        once: list[float] = []
        hops: list[list[float]] = []
        for _ in range(self.rounds):
            getattr(whole, direction)(clock)
            once += clock.milliseconds()
            getattr(ring, direction)(clock)
            hops.append(clock.milliseconds())
        medians = iter(np.median(hops, 0).tolist())
        by_rank = [[next(medians) for _ in getattr(rank, direction)] for rank in ring.ranks]
        ranks_ms = [*map(sum, by_rank)]
        one_call = float(np.median(once))
        total = replace(timing.Timing.of([*map(sum, hops)]), median_ms=sum(ranks_ms))
        flops = replace(point.whole, direction=direction).flops
        case = point.name(direction)
        record = measure.timed(case, "ringray", flops, verdict, total, self.peak)
        if record.status == "ok":
            record.more = {
                "whole_ms": one_call,
                "overhead": total.median_ms / one_call,
                "critical_path": max(ranks_ms) / one_call,
                "ideal": 1 / point.world_size,
                "ranks_ms": ranks_ms,
                "hops_ms": by_rank,
            }
        return record
