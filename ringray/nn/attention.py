"""``ContextParallelAttention``: multi-head attention of models whose sequence is sharded over a
ring.

Shape legend: B batch, S rows of one shard, Hq query heads, Hkv key/value heads, D head dim,
V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention import ring_attention
from ringray.attention.agreement import refusing
from ringray.attention.call import several
from ringray.attention.compile import on_host_op, operator
from ringray.attention.deal import deal, heard, spoken
from ringray.attention.documents import boundaries, document_boundaries
from ringray.attention.sharding import local_positions, refuse, remembered, traced_positions
from ringray.base.units import plain
from ringray.comm.ring import RingGroup, connect, name_of, place_in
from ringray.partition import Partitioning
from ringray.traffic.mask import Mask
from ringray_kernels.config import Blocks
from ringray_kernels.dropout import unusable_dropout
from ringray_kernels.intervals import within_documents
from ringray_kernels.modes import lasting


class ContextParallelAttention(nn.Module):
    """Multi-head attention of this rank's rows over the sequence of all ranks of a ring.

    Projections ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` (the names, layouts and RoPE of
    Llama checkpoints) around ``ringray.ring_attention``. Parameters are the same on every rank;
    their gradients are this rank's part and are summed over the ring, by DDP or FSDP for instance
    (see ``sharded_cross_entropy``).

    RoPE rotates dimension i of a head with dimension i + D / 2, by the position of the token times
    ``rope_theta ** (-2 i / D)``: angles in fp64, because fp32 is off by hundredths of a radian at a
    million tokens, the rotation itself in fp32. Positions are global; with ``cu_seqlens`` they
    restart at each document, as models trained on packed documents expect.

    Args:
        hidden_dim: features of a token.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of ``num_heads``; None is ``num_heads``.
        head_dim: D, at most 512, even with RoPE; None is ``hidden_dim / num_heads``.
        bias: of all four projections.
        causal, window, chunk, group, partition, transport, backend, blocks: as in
            ``ring_attention``.
        dropout_p: share of the weights of attention that training drops, at least 0, below 1; the
            same ones on any ring (see ``ring_attention``). None after ``eval()``.
        rope_theta: base of the RoPE frequencies; None for no RoPE.
        device, dtype: of the parameters.
        options: further keywords of ``ring_attention``, passed on as they are.

    Raises:
        ValueError: sizes that do not fit together, or an unknown partition.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = True,
        window: int | tuple[int | None, int | None] | None = None,
        chunk: int | None = None,
        dropout_p: float = 0.0,
        rope_theta: float | None = 10000.0,
        group: RingGroup = None,
        partition: Partitioning = partitions.DEFAULT,
        transport: str = transports.DEFAULT,
        backend: str = "auto",
        blocks: Blocks | int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden_dim, num_heads, num_kv_heads, head_dim, chunk, dropout_p = map(
            plain, (hidden_dim, num_heads, num_kv_heads, head_dim, chunk, dropout_p)
        )
        sizes = {"hidden_dim": hidden_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        sizes |= {} if head_dim is None else {"head_dim": head_dim}
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: got {value!r}, expected an integer of at least 1")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads: got {num_kv_heads}, expected a divisor of num_heads = {num_heads}"
            )
        if head_dim is None:
            if hidden_dim % num_heads:
                raise ValueError(
                    f"hidden_dim: got {hidden_dim}, expected a multiple of num_heads = "
                    f"{num_heads}, or head_dim given"
                )
            head_dim = hidden_dim // num_heads
        if rope_theta is not None:
            number = isinstance(rope_theta, int | float) and not isinstance(rope_theta, bool)
            if not (number and math.isfinite(rope_theta) and rope_theta > 0):
                raise ValueError(
                    f"rope_theta: got {rope_theta!r}, expected a positive number, or None"
                )
            if head_dim % 2:
                raise ValueError(f"head_dim: got {head_dim}, expected an even one for RoPE")
        window = several(window)
        if window is not None and not isinstance(window, tuple) and not causal:
            raise ValueError(
                f"window: got {window} with causal=False, expected causal=True or (left, right)"
            )
        if wrong := unusable_dropout(dropout_p, None):
            raise ValueError(wrong)
        partitions.get(partition)
        self.hidden_dim, self.head_dim = hidden_dim, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.causal, self.rope_theta = causal, rope_theta
        self.window, self.chunk, self.dropout_p = window, chunk, dropout_p
        self.group, self.partition = group, partition
        self.options = {"transport": transport, "backend": backend, "blocks": blocks, **options}
        like: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_dim, num_heads * head_dim, **like)
        self.k_proj = nn.Linear(hidden_dim, num_kv_heads * head_dim, **like)
        self.v_proj = nn.Linear(hidden_dim, num_kv_heads * head_dim, **like)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_dim, **like)

    def forward(
        self,
        x: Tensor,
        *,
        seq_len: int | None = None,
        cu_seqlens: Tensor | None = None,
        prefix: int | Sequence[int] | None = None,
        partition: Partitioning | None = None,
    ) -> Tensor:
        """Returns attention of this rank's rows; every rank of the ring calls it.

        Args:
            x: (B, S, hidden_dim), this rank's rows, as dealt by ``ringray.shard``. Rows of padding
                may hold anything.
            seq_len: true global length (tokens) when the shards hold padding; None means N * S.
            cu_seqlens: boundaries of packed documents, as in ``ring_attention``; on a GPU they cost
                one synchronisation for each new tensor, on the CPU none.
            prefix: positions that see each other in both directions, as in ``ring_attention``.
            partition: of this batch, such as what ``ringray.deal`` returns; None is the module's.

        Returns:
            (B, S, hidden_dim) in x's dtype (autocast's under autocast). Rows of padding are 0, and
            so are their gradients.

        Raises:
            ValueError: wrong shapes, or arguments that ``ring_attention`` refuses; on every rank.
        """
        cu_seqlens = boundaries(cu_seqlens)
        partition = self.partition if partition is None else partition
        if torch.compiler.is_compiling():
            return self._traced(x, seq_len, cu_seqlens, prefix, partition)
        comm = connect(self.group)
        with refusing(comm):
            length = self._length(x, comm.world_size, seq_len, partition)
            documents = document_boundaries(cu_seqlens, len(x))
            Mask(length, documents=documents)  # checks before RoPE uses them
            if partition == partitions.BALANCED:
                # Without window and chunk, which other layers of a model may not have.
                limits: dict[str, Any] = {"prefix": prefix, "cu_seqlens": documents}
                partition = deal(length, comm.world_size, causal=self.causal, **limits)
            where = partition, length, comm.world_size, comm.rank
            tokens = _tokens(*where)
            x, rotation = _blank(x, tokens), None
            if self.rope_theta is not None:
                angles = self.head_dim, float(self.rope_theta)
                rotation = _rotation(where, documents, *angles, x.device)
            q, k, v = self._heads(x, rotation)
        cu_seqlens = boundaries(documents)
        return _blank(self._attend(q, k, v, length, cu_seqlens, prefix, partition), tokens)

    def _traced(
        self,
        x: Tensor,
        seq_len: int | None,
        cu_seqlens: Tensor | None,
        prefix: Any,
        partition: Partitioning,
    ) -> Tensor:
        """Computes ``forward`` for ``torch.compile``: without caches and without reading
        tensors."""
        rank, ranks = place_in(self.group)
        if x.dim() != 3 or x.shape[-1] != self.hidden_dim:  # other ranks may run theirs already
            why = f"x: got {{}}, expected (B, S, {self.hidden_dim})"
            return x.detach() * refuse(why, [x.detach()], name_of(self.group), ranks)
        where = (*spoken(partition), x.shape[1] * ranks, ranks, rank)
        length = plain(seq_len)
        if length is None:
            length = partitions.dealt_length(partition) or x.shape[1] * ranks
        padding = None
        if length < x.shape[1] * ranks:  # other lengths are refused by ring_attention
            padding = (traced_positions(*where).to(x.device) >= length)[:, None]
            x = x.masked_fill(padding, 0)
        rotation = None
        if self.rope_theta is not None:
            documents = None if cu_seqlens is None else on_host_op(cu_seqlens)
            rotation = _rotation_op(
                documents, *where, length, self.head_dim, float(self.rope_theta), x.device
            )
        out = self._attend(*self._heads(x, rotation), length, cu_seqlens, prefix, partition)
        return out if padding is None else out.masked_fill(padding, 0)

    def _heads(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, (B, H, S, D)."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotation is None:
            return q, k, v
        return _rotate(q, *rotation), _rotate(k, *rotation), v

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_len: int,
        cu_seqlens: Tensor | None,
        prefix: Any,
        partition: Partitioning,
    ) -> Tensor:
        options = {"group": self.group, "partition": partition, **self.options}
        options |= {"causal": self.causal, "window": self.window, "chunk": self.chunk}
        options |= {"prefix": prefix, "seq_len": seq_len, "cu_seqlens": cu_seqlens}
        dropout_p = self.dropout_p if self.training else 0.0
        out = ring_attention(q, k, v, dropout_p=dropout_p, **options)
        return self.o_proj(cast("Tensor", out).transpose(1, 2).flatten(2))

    def _length(self, x: Tensor, ranks: int, seq_len: int | None, partition: Partitioning) -> int:
        """Returns the true global length; raises ValueError for a wrong shape or length."""
        if x.dim() != 3 or x.shape[-1] != self.hidden_dim:
            raise ValueError(f"x: got shape {tuple(x.shape)}, expected (B, S, {self.hidden_dim})")
        length = remembered(x) if seq_len is None else plain(seq_len)
        return partitions.true_length(partition, length, x.shape[1], ranks)

    def extra_repr(self) -> str:
        names = "num_heads num_kv_heads head_dim causal window chunk dropout_p rope_theta partition"
        shown = {name: getattr(self, name) for name in names.split()} | self.options
        # Of a tensor, such as a bias of all pairs, its shape: its values fill pages.
        return ", ".join(
            f"{name}={tuple(value.shape) if isinstance(value, Tensor) else value!r}"
            for name, value in shown.items()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelAttention:
        # A copy, such as averaged weights, uses the same ring: groups cannot be copied.
        memo[id(self.group)] = self.group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


@lru_cache(maxsize=16)
def _tokens(partition: Partitioning, seq_len: int, world_size: int, rank: int) -> int:
    """Counts the rows of a rank that are tokens; padding follows them."""
    return int((local_positions(partition, seq_len, world_size, rank) < seq_len).sum())


def _blank(x: Tensor, tokens: int) -> Tensor:
    """Returns x (B, S, ...) with the rows from ``tokens`` on and their gradients set to 0.

    A product with a mask would keep NaN: 0 x NaN is NaN.
    """
    if tokens == x.shape[1]:
        return x
    return F.pad(x[:, :tokens], (0, 0, 0, x.shape[1] - tokens))


# All layers of a model share one entry, fp32 (S, D) in total; a second one serves evaluation.
@lru_cache(maxsize=2)
def _rotation(
    where: tuple[Partitioning, int, int, int],
    documents: Any,
    head_dim: int,
    theta: float,
    device: Any,
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of this rank's RoPE angles, fp32 (S, D / 2), or (B, 1, S, D / 2) where
    batch rows hold documents of their own. ``where``: arguments of ``local_positions``."""
    with lasting(device):  # a later training step may take them from the cache
        positions = local_positions(*where).to(device)
        if documents is not None:
            positions = within_documents(positions, boundaries(documents).to(device))
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
        angles = positions.double()[..., None] * theta ** (-pairs / head_dim)
        angles = angles.unsqueeze(1) if angles.dim() == 3 else angles
        return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (i, i + D / 2) of x (B, H, S, D) in fp32; returns x's dtype."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


# Operators, for torch.compile; see ``attention.compile``. All layers of a graph share one result.


def _like_rotation(cu_seqlens: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    _, _, padded, ranks, _, _, head_dim, _, device = arguments
    rows = cu_seqlens.shape[:-1] if cu_seqlens is not None else ()
    shape = (*rows, *[1] * len(rows), padded // ranks, head_dim // 2)
    cos = torch.empty(shape, dtype=torch.float32, device=device)
    return cos, torch.empty_like(cos)


@operator(
    "rotation(Tensor? cu_seqlens, str partition, Tensor? dealt, SymInt padded, SymInt ranks, "
    "SymInt rank, SymInt seq_len, int head_dim, float theta, Device device) "
    "-> (Tensor cos, Tensor sin)",
    fake=_like_rotation,
)
def _rotation_op(cu_seqlens: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    name, dealt, padded, ranks, rank, seq_len, head_dim, theta, device = arguments
    partition = heard(name, dealt)
    if isinstance(partition, partitions.Dealt):
        padded = partition.seq_len
    where = partition, padded, ranks, rank
    try:
        batch = 1 if cu_seqlens is None else len(cu_seqlens)
        documents = document_boundaries(cu_seqlens, batch)
        Mask(seq_len, documents=documents)
    except ValueError:
        documents = None  # ring_attention refuses them on every rank
    cos, sin = _rotation(where, documents, head_dim, theta, device)
    return cos.clone(), sin.clone()  # the caller must not write into the cache
