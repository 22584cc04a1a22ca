"""``ShardedKV``: keys and values of a long context, of which each rank of a ring holds a part.

Shape legend: B batch, Hkv key/value heads, T new tokens, R rows of this rank, D head dim,
Dv that of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ringray import partition as partitions
from ringray.attention.agreement import refusing
from ringray.attention.problem import positions
from ringray.attention.sharding import remembered
from ringray.base.units import plain
from ringray.comm.ring import RingGroup, connect
from ringray.partition import Partitioning
from ringray.traffic.geometry import Layout
from ringray_kernels.checks import check_qkv, not_plain
from ringray_kernels.modes import lasting

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_TOKENS = 1 << 62


class ShardedKV:
    """Keys and values of ``length`` tokens on the ranks of a ring, with room for ``capacity``.

    A token after the first ones, which a partition deals, goes to the rank of its position modulo
    the number of ranks, so the shards grow evenly. The position of every row is known from the
    start; on each rank they increase. ``empty`` makes a cache without tokens, ``of_shards`` one
    that holds the shards of a prefill. Every rank of ``group`` makes its own and makes the same
    calls; ``ring_decode`` compares them.

    ``length``, ``capacity``: tokens over all ranks. ``dealt``: how many a partition dealt, and
    ``partition`` its name, "" for none. ``rank``, ``ranks``: of the ring.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        capacity: int,
        group: RingGroup,
        partition: Partitioning = "",
        dealt: int = 0,
        padded: int = 0,
    ) -> None:
        """Makes room for rows like those of ``k`` and ``v`` (B, Hkv, any, D or Dv); for ``empty``
        and ``of_shards``, which say what the arguments mean. ``padded``: length that was dealt."""
        if type(capacity) is not int or not max(1, dealt) <= capacity <= MOST_TOKENS:
            raise ValueError(
                f"capacity: got {capacity!r}, expected a number of tokens of at least "
                f"{max(1, dealt)}, the length of the cache"
            )
        comm = connect(group)
        self.group, self.rank, self.ranks = group, comm.rank, comm.world_size
        self.length, self.capacity = dealt, capacity
        self.partition, self.dealt = partition, dealt
        first = np.empty(0, np.int64)
        if dealt:
            layout = Layout(partition, padded, self.ranks)
            first = positions(layout, self.rank, torch.device("cpu")).numpy()
        appended = np.arange(dealt + (self.rank - dealt) % self.ranks, capacity, self.ranks)
        self._positions = np.concatenate([first[first < dealt], appended])
        rows = max(1, len(self._positions))
        with lasting(k.device):
            self._k, self._v = (x.new_empty((*x.shape[:2], rows, x.shape[3])) for x in (k, v))

    @classmethod
    def empty(
        cls,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        capacity: int,
        value_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        group: RingGroup = None,
    ) -> ShardedKV:
        """Returns a cache without tokens.

        Args:
            batch, kv_heads, head_dim: B, Hkv and D of the keys and values to come.
            capacity: tokens that it may hold, over all ranks; each has memory for its share.
            value_head_dim: Dv; None is D.
            dtype, device: of the keys and values.
            group: process group of the ring; as in ``ring_attention``.

        Raises:
            ValueError: a size that is not positive, or no such dtype.
        """
        batch, kv_heads, head_dim, capacity = map(plain, (batch, kv_heads, head_dim, capacity))
        with refusing(connect(group)):
            for name, size in (("batch", batch), ("kv_heads", kv_heads), ("head_dim", head_dim)):
                if type(size) is not int or size < 1:
                    raise ValueError(f"{name}: got {size!r}, expected an integer of at least 1")
            dims = (head_dim, head_dim if value_head_dim is None else plain(value_head_dim))
            k, v = (torch.empty(batch, kv_heads, 1, x, dtype=dtype, device=device) for x in dims)
            check_qkv(k, k, v)
            return cls(k, v, capacity, group)

    @classmethod
    def of_shards(
        cls,
        k: Tensor,
        v: Tensor,
        *,
        capacity: int,
        partition: Partitioning = partitions.DEFAULT,
        seq_len: int | None = None,
        group: RingGroup = None,
    ) -> ShardedKV:
        """Returns a cache with copies of a prefill's keys and values.

        Args:
            k, v: (B, Hkv, S, D) and (B, Hkv, S, Dv), this rank's shards, as for ``ring_attention``.
            capacity: tokens that it may hold, the prefill's and those to come, over all ranks.
            partition: rule that dealt the shards.
            seq_len: true length of the prefill (tokens); None is the length that the shards
                remember from ``ringray.shard``, else N * S. Padding is not kept.
            group: process group of the ring; as in ``ring_attention``.

        Raises:
            ValueError: wrong shapes or dtypes, an unknown partition, a length these shards cannot
                have, or a capacity below it.
        """
        capacity, seq_len = plain(capacity), plain(seq_len)
        comm = connect(group)
        with refusing(comm):
            check_qkv(k, k, v)
            length = remembered(k, v) if seq_len is None else seq_len
            length = partitions.true_length(partition, length, k.shape[2], comm.world_size)
            padded = k.shape[2] * comm.world_size
            cache = cls(k.detach(), v.detach(), capacity, group, partition, length, padded)
            with lasting(k.device):
                for held, prefill in zip((cache._k, cache._v), (k, v), strict=True):
                    held[:, :, : cache.rows] = prefill.detach()[:, :, : cache.rows]
            return cache

    @property
    def rows(self) -> int:
        """Returns the rows that this rank holds."""
        return int(np.searchsorted(self._positions, self.length))

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Returns the memory of keys and values, (B, Hkv, at least rows, D or Dv), contiguous."""
        return self._k, self._v

    @property
    def k(self) -> Tensor:
        """Returns a view of this rank's keys, (B, Hkv, rows, D)."""
        return self._k[:, :, : self.rows]

    @property
    def v(self) -> Tensor:
        """Returns a view of this rank's values, (B, Hkv, rows, Dv)."""
        return self._v[:, :, : self.rows]

    @property
    def positions(self) -> NDArray[np.int64]:
        """Returns the global positions of this rank's rows, strictly increasing; not to be
        changed."""
        return self._positions[: self.rows]

    def append(self, k: Tensor, v: Tensor, *, position: int | None = None) -> None:
        """Appends new tokens, of which this rank keeps its share. Sends nothing.

        Args:
            k, v: (B, Hkv, T, D) and (B, Hkv, T, Dv), of the same T tokens on every rank.
            position: global position of the first of them, to be checked; None is ``length``.

        Raises:
            ValueError: other shapes, dtypes or devices than the cache's, a position other than
                ``length``, or more tokens than the capacity; on every rank at its next call of
                ``ring_decode`` at the latest. The cache stays as it was.
        """
        with refusing(connect(self.group)):
            self._check(k, v, plain(position))
            length = self.length + k.shape[2]
            stop = int(np.searchsorted(self._positions, length))
            own = slice((self.rank - self.length) % self.ranks, None, self.ranks)
            with lasting(k.device):
                for held, new in ((self._k, k), (self._v, v)):
                    held[:, :, self.rows : stop] = new.detach()[:, :, own]
        # The tokens count only once their rows are written.
        self.length = length

    def _check(self, k: Tensor, v: Tensor, position: int | None) -> None:
        for name, x, held in (("k", k, self._k), ("v", v, self._v)):
            if not isinstance(x, Tensor):
                raise ValueError(f"{name}: got {type(x).__name__}, expected a tensor")
            if reason := not_plain(x):
                raise ValueError(f"{name}: got {reason}")
            tokens = max(1, k.shape[2]) if k.dim() == 4 else 1
            expected = (*held.shape[:2], tokens, held.shape[3])
            if x.shape != expected or x.dtype != held.dtype or x.device != held.device:
                raise ValueError(
                    f"{name}: got {tuple(x.shape)}, {x.dtype} on {x.device}, expected "
                    f"{expected}, {held.dtype} on {held.device} as the cache holds"
                )
        if position is not None and position != self.length:
            raise ValueError(
                f"position: got {position!r}, expected {self.length}: positions go on where the "
                "cache ends"
            )
        if self.length + k.shape[2] > self.capacity:
            raise ValueError(
                f"capacity: got {k.shape[2]} tokens beyond {self.length}, expected at most "
                f"{self.capacity - self.length}: the cache has room for {self.capacity}"
            )

    def crop(self, length: int) -> None:
        """Forgets the tokens from position ``length`` on, as when proposed tokens are rejected.

        Raises:
            ValueError: a length beyond that of the cache, or below that of the prefill.
        """
        length = plain(length)
        with refusing(connect(self.group)):
            if type(length) is not int or not self.dealt <= length <= self.length:
                raise ValueError(
                    f"length: got {length!r}, expected {self.dealt} to {self.length} tokens"
                )
        self.length = length
