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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

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
    """A rank's positions in the sequence, its shard, and its hops in each pass."""

    positions: Tensor
    shard: Inputs
    forward: list[_Hop]
    backward: list[_Hop]


class VirtualRing:
    """All ranks of one virtual ring, and their results so far."""

    def __init__(self, point: VirtualPoint, inputs: Inputs, backend: str) -> None:
        self.inputs = inputs
        self.device = inputs.q.device
        self.more: dict[str, Any] = {"scale": point.whole.scale, "backend": backend}
        self.ranks = [self._rank(point, rank, backend) for rank in range(point.world_size)]
        self.states: list[State] = []
        self.deltas: list[Tensor] = []
        self.grads: list[tuple[Tensor, Tensor, Tensor]] = []

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
        self.states = []
        for rank in self.ranks:
            clock.head_start()
            state: State | None = None
            for i, hop in enumerate(rank.forward):
                last = i == len(rank.forward) - 1
                out_dtype = rank.shard.q.dtype if last else None
                k, v = self._cut(hop)
                state = clock.time(
                    ringray_kernels.forward, rank.shard.q, k, v, hop.start, hop.end, state=state,
                    out_dtype=out_dtype, **self.more,
                )  # fmt: skip
            assert state is not None
            self.states.append(state)

    def prepare_backward(self) -> None:
        """Computes delta and zeroes the gradients, after the last forward."""
        self.deltas, self.grads = [], []
        for rank, state in zip(self.ranks, self.states, strict=True):
            shard = rank.shard
            backend = self.more["backend"]
            self.deltas.append(ringray_kernels.delta(shard.dout, *state, backend=backend))
            dq, dk, dv = (
                torch.zeros(x.shape, dtype=torch.float32, device=self.device) for x in shard[:3]
            )
            self.grads.append((dq, dk, dv))

    def backward(self, clock: Clock) -> None:
        """Runs the backward hops of all ranks and times each call.

        Ranks add dK and dV to their owner's; a real ring sends the sums.
        """
        for rank, state, delta, grads in zip(
            self.ranks, self.states, self.deltas, self.grads, strict=True
        ):
            clock.head_start()
            for hop in rank.backward:
                k, v = self._cut(hop)
                dk, dv = (x[:, :, hop.rows] for x in self.grads[hop.owner][1:])
                clock.time(
                    ringray_kernels.backward, rank.shard.dout, rank.shard.q, k, v, state.lse, delta,
                    hop.start, hop.end, dq=grads[0], dk=dk, dv=dv, out=state.out, **self.more,
                )  # fmt: skip

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
            return {"out": whole([state.out for state in self.states])}
        names = ("dq", "dk", "dv")
        return {n: whole([grads[i] for grads in self.grads]) for i, n in enumerate(names)}


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
                for one in (ring, whole):
                    if direction == "backward":
                        one.prepare_backward()
                    getattr(one, direction)(clock)
                    verdicts.append(
                        checks.check(one.assembled(direction), right[direction], inputs.q.dtype)
                    )
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
        verdict: checks.Verdict,
    ) -> Record:
        case = point.name(direction)
        once: list[float] = []
        hops: list[list[float]] = []
        for _ in range(self.rounds):
            getattr(whole, direction)(clock)
            once += clock.milliseconds()
            getattr(ring, direction)(clock)
            hops.append(clock.milliseconds())
        counts = [len(getattr(rank, direction)) for rank in ring.ranks]
        medians = [timing.percentile(samples, 0.5) for samples in zip(*hops, strict=True)]
        by_rank = [
            medians[sum(counts[:rank]) : sum(counts[: rank + 1])] for rank in range(len(counts))
        ]
        ranks_ms = [sum(one) for one in by_rank]
        one_call = timing.percentile(once, 0.5)
        sums = [sum(one) for one in hops]
        total = timing.Timing(
            sum(medians), timing.percentile(sums, 0.2), timing.percentile(sums, 0.8), 1
        )
        flops = replace(point.whole, direction=direction).flops
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
