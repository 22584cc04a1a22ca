"""One rank's share of one attention problem: positions, intervals and walks.

They are found once per problem, and kept with it: all layers and steps of a shape share one
``RankProblem`` (see ``arguments.prepare``), and the kernels keep what they derive from intervals
with those (``ringray_kernels.intervals.derived``).

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

import ringray_kernels
from ringray.attention.call import Call, Slopes
from ringray.traffic import script, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.hulls import Pass
from ringray.traffic.mask import Mask, argument_of
from ringray.traffic.script import Script
from ringray.traffic.walk import Backward, Costs, Rows, Walks
from ringray.transport import Exchange
from ringray_kernels import State
from ringray_kernels.bias import Bias
from ringray_kernels.dropout import Dropout
from ringray_kernels.intervals import Positions, capturing, intervals, visible_ranges
from ringray_kernels.modes import lasting

T = TypeVar("T")
Ranges = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class RankProblem:
    """The problem of one rank; equal on all ranks except for ``rank``, ``slopes``, ``first_head``
    and ``seed``."""

    #: What all ranks have agreed on.
    call: Call

    #: Positions on the ring in which chunks walk.
    layout: Layout

    #: Of that ring.
    rank: int

    exchange: Exchange

    #: Bytes of a travelling row.
    costs: Costs

    #: Of ALiBi, for the heads that this rank computes, for all batch rows or for each.
    slopes: Slopes | None = None

    #: Of those heads, among all.
    first_head: int = 0

    #: The dtype of out, and of q, k and v before they were quantized; None: they are not.
    quantized_from: torch.dtype | None = None

    #: Of dropout in this call, see ``seeded``.
    seed: int = 0

    def seeded(self, seed: int) -> RankProblem:
        """Returns the problem of a call with this seed of dropout, which shares all that is kept
        with this one."""
        _ = self.kernel, self.own, self._scripts, self._kept
        seeded = copy(self)
        seeded.__dict__["seed"] = seed
        return seeded

    @property
    def backward(self) -> Backward:
        """Returns the way in which operands travel in the backward pass."""
        return cast("Backward", self.call.strategy.backward)

    @cached_property
    def kernel(self) -> dict[str, Any]:
        """Returns the keywords of all calls of ``ringray_kernels``."""
        return {
            "scale": self.call.score.scale,
            "softcap": self.call.score.softcap,
            "blocks": self.call.strategy.blocks,
            "backend": self.call.strategy.backend,
        }

    @cached_property
    def own(self) -> Rows:
        """Returns all rows of this rank."""
        return Rows(0, self.layout.rows)

    @cached_property
    def walks(self) -> Walks:
        """Returns the walks of both passes; raises ``walk.Unwalkable`` if ``backward`` is
        impossible."""
        return walk.choose(
            self.layout, self.call.mask, self.exchange.routes, self.backward, self.costs
        )

    @cached_property
    def _scripts(self) -> dict[Pass, Script]:
        walks, rows = self.walks, self.layout.rows
        moved: dict[Pass, Any] = {"forward": walks.forward, "backward": walks.backward}
        return {which: script.write(x, which, rows, self.rank) for which, x in moved.items()}

    def script(self, which: Pass) -> Script:
        """Returns this rank's part of one pass."""
        return self._scripts[which]

    @cached_property
    def _kept(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        """Returns ``make()``, tensors on ``device``, which is kept with the problem under ``key``.

        Raises:
            RuntimeError: it is not there yet, while a CUDA graph is captured, whose memory it would
                be in.
        """
        value = self._kept.get((key, device))
        if value is None:
            if capturing(device):
                raise RuntimeError(
                    "ring_attention: got a problem that is new while a CUDA graph is captured, "
                    "expected one that has run before: run the step once, then capture it"
                )
            with lasting(device):
                value = self._kept[key, device] = make()
        return cast("T", value)

    def positions_at(self, rank: int, rows: Rows, device: torch.device) -> Tensor:
        """Returns the global positions of rows of a rank, int64, strictly increasing."""
        return _at(positions(self.layout, rank, device), rows)

    def by_position(
        self,
        queries: int,
        rows: Rows,
        owner: int,
        keys: Rows,
        heads: slice,
        device: torch.device,
        bias: tuple[Tensor, ...],
    ) -> dict[str, Any]:
        """Returns the keywords of ``ringray_kernels`` that depend on positions, bias and dropout,
        for some heads of the rows ``rows`` of the rank ``queries`` and ``owner``'s rows
        ``keys``. ``bias``: see ``ScoreParameters``."""
        if self.call.score.bias is None and not self.call.score.dropout_p:
            return {}
        positions = _at(self._positions_32(owner, device), keys)
        return self.by_position_at(queries, rows, positions, heads, bias)

    def by_position_at(
        self, queries: int, rows: Rows, keys: Tensor, heads: slice, bias: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Returns the same as ``by_position`` for keys at any positions, int32."""
        keywords: dict[str, Any] = {}
        if self.call.score.bias is None and not self.call.score.dropout_p:
            return keywords
        device, slopes, some = keys.device, self.slopes, slice(rows.start, rows.stop)
        positions = self._positions_32(queries, device)
        if slopes is not None:
            like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
            bias = (self.once("slopes", device, lambda: torch.tensor(slopes, **like).to(device)),)
        if bias:
            keywords["bias"] = Bias.of_hop(positions, some, keys, heads, *bias)
        if self.call.score.dropout_p:
            first = self.first_head + (heads.start or 0)
            keywords["dropout"] = Dropout(self.call.score.dropout_p, self.seed, first)
            keywords["at"] = Positions(positions[some], keys)
        return keywords

    def _positions_32(self, rank: int, device: torch.device) -> Tensor:
        return self.once(
            ("int32", rank), device, lambda: positions(self.layout, rank, device).int()
        )

    def intervals(
        self, queries: int, rows: Rows, owner: int, keys: Rows, device: torch.device
    ) -> Ranges:
        """Returns ``start``, ``end``, int32 (B or 1, rows): the range of ``owner``'s rows ``keys``
        that each of the rows ``rows`` of the rank ``queries`` sees; of each range, where some mask
        has several, that has a key: they have none in common. At least one."""

        def make() -> Ranges:
            chosen = _at(positions(self.layout, owner, device), keys)
            return self.intervals_of(queries, rows, chosen)

        return self.once((queries, rows, owner, keys), device, make)

    def intervals_of(self, queries: int, rows: Rows, keys: Tensor) -> Ranges:
        """Returns the same as ``intervals`` for keys at any strictly increasing positions."""
        part = slice(rows.start, rows.stop)
        seen = _seen_by(self.call.mask, self.layout, queries, keys.device)
        ranges = tuple(
            intervals(low[:, part].contiguous(), high[:, part].contiguous(), keys)
            for low, high in seen
        )
        if len(ranges) == 1:  # else it waits for the device
            return ranges
        with_keys = [(start, end) for start, end in ranges if bool((start < end).any())]
        return tuple(with_keys) or ranges[:1]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ranges: Ranges,
        state: State | None = None,
        out_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> State:
        """Returns attention of ``q`` over ``ranges`` of the keys, merged into ``state``; in
        ``out_dtype`` after the last of all. ``options``: see ``by_position``; and scales of q,
        k and v."""
        for start, end in ranges:
            dtype = out_dtype if start is ranges[-1][0] else None
            state = ringray_kernels.forward(
                q, k, v, start, end, state=state, out_dtype=dtype, **self.kernel, **options
            )
        assert state is not None
        return state

    def differentiate(
        self, queries: tuple[Tensor, ...], k: Tensor, v: Tensor, ranges: Ranges, **options: Any
    ) -> None:
        """Adds the gradients of attention over ``ranges`` of the keys to dq, dk and dv among the
        ``options``. ``queries``: q, dout, lse and delta."""
        q, dout, lse, delta = queries
        for start, end in ranges:
            ringray_kernels.backward(
                dout, q, k, v, lse, delta, start, end, **self.kernel, **options
            )


def _at(positions: Tensor, rows: Rows) -> Tensor:
    """Returns the positions of some rows of a rank."""
    parts = [positions[part] for part in rows.parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@lru_cache(maxsize=128)
def positions(layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Returns the global positions of a rank's rows, int64 (rows,), strictly increasing; not to be
    changed."""
    with lasting(device):
        like: dict[str, Any] = {"dtype": torch.int64, "device": device}
        parts = [torch.arange(r.start, r.stop, r.step, **like) for r in layout.ranges(rank)]
        return torch.cat(parts).sort().values


@lru_cache(maxsize=16)
def _seen_by(mask: Mask, layout: Layout, rank: int, device: torch.device) -> Ranges:
    queries = positions(layout, rank, device)
    with lasting(device):
        each = [visible_ranges(queries, mask.seq_len, **keywords(row, device)) for row in mask.rows]
        lows_and_highs = [zip(*ranges, strict=True) for ranges in zip(*each, strict=True)]
        return tuple((torch.stack(low), torch.stack(high)) for low, high in lows_and_highs)


def keywords(mask: Mask, device: torch.device | str) -> dict[str, Any]:
    """Returns a mask, except its length, as the arguments of ``ring_attention`` and of
    ``visible_ranges``."""
    values = {argument_of(x.name): getattr(mask, x.name) for x in fields(mask)}
    del values["seq_len"]
    if mask.documents is not None:
        ends = torch.tensor(mask.documents, dtype=torch.int64, device="cpu")
        values["cu_seqlens"] = ends.to(device, non_blocking=True)
    return values
