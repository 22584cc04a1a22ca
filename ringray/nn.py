"""Building blocks of models whose sequence is sharded over a ring: attention, and the loss.

Shape legend: B batch, S rows of one shard, Hq query heads, Hkv key/value heads, D head dim,
V vocabulary.
"""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringray import partition as partitions
from ringray.agreement import refusing
from ringray.attention import document_boundaries, ring_attention
from ringray.comm import connect
from ringray.geometry import Mask
from ringray.sharding import local_positions

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringray.comm import Comm
    from ringray_kernels.config import Blocks

__all__ = ["ContextParallelAttention", "next_token_labels", "sharded_cross_entropy"]


class ContextParallelAttention(nn.Module):
    """Multi-head attention of this rank's rows over the sequence of all ranks of a ring.

    Projections ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` (the names, layouts and RoPE of
    Llama checkpoints) around ``ringray.ring_attention``. Parameters are the same on every rank;
    their gradients are this rank's part and are summed over the ring, by DDP or FSDP for instance
    (see ``sharded_cross_entropy``).

    RoPE turns dimension i of a head with dimension i + D / 2, by the position of the token times
    ``rope_theta ** (-2 i / D)``: angles in fp64, because fp32 is off by hundredths of a radian at a
    million tokens, the turn itself in fp32. Positions are global; with ``cu_seqlens`` they restart
    at each document, as models trained on packed documents expect.

    Args:
        hidden_dim: features of a token.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of ``num_heads``; None is ``num_heads``.
        head_dim: D, at most 256, even with RoPE; None is ``hidden_dim / num_heads``.
        bias: of all four projections.
        causal, window, group, partition, transport, backend, blocks: as in ``ring_attention``.
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
        window: int | None = None,
        rope_theta: float | None = 10000.0,
        group: dist.ProcessGroup | None = None,
        partition: str = "zigzag",
        transport: str = "ring",
        backend: str = "auto",
        blocks: Blocks | int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (
            ("hidden_dim", hidden_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads),
            *((("head_dim", head_dim),) if head_dim is not None else ()),
        ):  # fmt: skip
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
        if window is not None and not causal:
            raise ValueError(f"window: got {window} with causal=False, expected causal=True")
        partitions.get(partition)
        self.hidden_dim, self.head_dim = hidden_dim, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.causal, self.window, self.rope_theta = causal, window, rope_theta
        self.group, self.partition = group, partition
        self.options = {"transport": transport, "backend": backend, "blocks": blocks, **options}
        like: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_dim, num_heads * head_dim, **like)
        self.k_proj = nn.Linear(hidden_dim, num_kv_heads * head_dim, **like)
        self.v_proj = nn.Linear(hidden_dim, num_kv_heads * head_dim, **like)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_dim, **like)

    def forward(
        self, x: Tensor, *, seq_len: int | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Attention of this rank's rows; every rank of the ring calls it.

        Args:
            x: (B, S, hidden_dim), this rank's rows, as dealt by ``ringray.shard``. Rows of padding
                may hold anything.
            seq_len: true global length (tokens) when the shards hold padding; None means N * S.
            cu_seqlens: boundaries of packed documents, as in ``ring_attention``; on the CPU they
                cost a GPU no synchronisation.

        Returns:
            (B, S, hidden_dim) in x's dtype (autocast's under autocast). Rows of padding are 0, and
            so are their gradients.

        Raises:
            ValueError: wrong shapes, or whatever ``ring_attention`` refuses; on every rank.
        """
        comm = connect(self.group)
        with refusing(comm, getattr(x, "device", torch.device("cpu"))):
            if x.dim() != 3 or x.shape[-1] != self.hidden_dim:
                raise ValueError(
                    f"x: got shape {tuple(x.shape)}, expected (B, S, {self.hidden_dim})"
                )
            mask = self._mask(x.shape[1], comm, seq_len, cu_seqlens)
            tokens = _tokens(self.partition, mask.seq_len, comm.world_size, comm.rank)
            x = _blank(x, tokens)
            q, k, v = (
                project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for project in (self.q_proj, self.k_proj, self.v_proj)
            )
            if self.rope_theta is not None:
                cos, sin = _rotation(
                    self.partition, mask.seq_len, comm.world_size, comm.rank, mask.documents,
                    self.head_dim, float(self.rope_theta), x.device,
                )  # fmt: skip
                q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = ring_attention(
            q, k, v, group=self.group, partition=self.partition, causal=self.causal,
            window=self.window, seq_len=mask.seq_len,
            cu_seqlens=None if mask.documents is None else torch.tensor(mask.documents),
            **self.options,
        )  # fmt: skip
        out = cast("Tensor", out).transpose(1, 2).flatten(2)
        return _blank(self.o_proj(out), tokens)

    def _mask(self, rows: int, comm: Comm, seq_len: int | None, cu_seqlens: Tensor | None) -> Mask:
        """The checked problem; ``ring_attention`` checks again, but RoPE comes before it."""
        padded = rows * comm.world_size
        length = padded if seq_len is None else seq_len
        if type(length) is not int or length < 1:
            raise ValueError(f"seq_len: got {length!r}, expected None or an integer of at least 1")
        if partitions.padded_length(self.partition, length, comm.world_size) != padded:
            raise ValueError(
                f"seq_len: {comm.world_size} ranks x {rows} rows = {padded} positions cannot hold "
                f"{length} tokens dealt by {self.partition!r}; pad and deal with ringray.shard"
            )
        return Mask(length, self.causal, self.window, document_boundaries(cu_seqlens, length))

    def extra_repr(self) -> str:
        said = {
            "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim, "causal": self.causal, "window": self.window,
            "rope_theta": self.rope_theta, "partition": self.partition, **self.options,
        }  # fmt: skip
        return ", ".join(f"{name}={value!r}" for name, value in said.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelAttention:
        # A copy, such as averaged weights, talks to the same ring: groups cannot be copied.
        memo[id(self.group)] = self.group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


@lru_cache(maxsize=16)
def _tokens(partition: str, seq_len: int, world_size: int, rank: int) -> int:
    """How many of a rank's rows are tokens; the padding stands behind them."""
    return int((local_positions(partition, seq_len, world_size, rank) < seq_len).sum())


def _blank(x: Tensor, tokens: int) -> Tensor:
    """x (B, S, ...) with rows from ``tokens`` on set to 0, and no gradient in or out of them.

    Not a product with a mask: 0 x NaN would be NaN.
    """
    if tokens == x.shape[1]:
        return x
    return F.pad(x[:, :tokens], (0, 0, 0, x.shape[1] - tokens))


# All layers of a model share one entry, fp32 (S, D) in total; one more is for an evaluation.
@lru_cache(maxsize=2)
def _rotation(
    partition: str,
    seq_len: int,
    world_size: int,
    rank: int,
    documents: tuple[int, ...] | None,
    head_dim: int,
    theta: float,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """cos and sin of this rank's RoPE angles, fp32 (S, D / 2)."""
    with torch.inference_mode(False):  # a later training step may find them in the cache
        positions = local_positions(partition, seq_len, world_size, rank).to(device)
        if documents is not None:
            boundaries = torch.tensor(documents, device=device)
            positions -= boundaries[torch.searchsorted(boundaries, positions, right=True) - 1]
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
        angles = torch.outer(positions.double(), theta ** (-pairs / head_dim))
        return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, S, D) with each pair (i, i + D / 2) turned, in fp32; in x's dtype."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def next_token_labels(
    input_ids: Tensor, cu_seqlens: Tensor | None = None, *, ignore_index: int = -100
) -> Tensor:
    """Labels of a causal language model: each token's successor within its document.

    Of the *whole* sequence, before it is sharded: the successor of a shard's last row is on another
    rank.

    Args:
        input_ids: (B, sequence), integers.
        cu_seqlens: boundaries of packed documents, as in ``ring_attention``.
        ignore_index: label of each document's last token, which has no successor.

    Returns:
        (B, sequence), int64.
    """
    labels = torch.full_like(input_ids, ignore_index, dtype=torch.int64)
    labels[:, :-1] = input_ids[:, 1:]
    if cu_seqlens is not None:
        ends = cu_seqlens.to(labels.device, torch.int64)
        labels[:, ends[ends > 0] - 1] = ignore_index
    return labels


def sharded_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
    gradients: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Cross entropy per token over all ranks of ``group``: the sum of all losses / their number.

    A mean of the ranks' means would weigh tokens by how many labels their rank happens to hold;
    this is the loss of one process that holds everything, whatever is ignored where. Labels are
    shifted *before* sharding (``next_token_labels``) and padded with ``ignore_index``:
    ``ringray.shard(labels, dim=1, pad_value=-100)``.

    Args:
        logits: (..., V) floating point, this rank's rows, finite; losses are computed in fp32.
        labels: (...) integers, this rank's rows.
        group: every rank that holds tokens of this step. None is the default group; pass the ring's
            or, for one mean over data-parallel replicas as well, all ranks of ring x replicas.
        ignore_index: label of tokens that count for nothing: prompts, document ends, padding.
        gradients: what becomes of parameter gradients afterwards. ``sum``: each rank gets its part
            of the gradient, and the parts are summed over ``group``. ``mean``: wrappers that
            average over ``group``, as DDP and FSDP do, get the same result.

    Returns:
        fp32 scalar, bitwise equal on every rank; 0 with gradients 0 where every label of every rank
        is ignored.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an unknown ``gradients``.
    """
    if gradients not in ("sum", "mean"):
        raise ValueError(f"gradients: got {gradients!r}, expected 'sum' or 'mean'")
    if not logits.is_floating_point() or logits.dim() < 2:
        raise ValueError(
            f"logits: got {logits.dtype} of shape {tuple(logits.shape)}, expected floating point "
            "(..., V)"
        )
    if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels: got {labels.dtype} of shape {tuple(labels.shape)}, expected integers of "
            f"shape {tuple(logits.shape[:-1])}, as the logits"
        )
    comm = connect(group)
    labels = labels.flatten().long()
    own = F.cross_entropy(
        logits.flatten(0, -2).float(), labels, ignore_index=ignore_index, reduction="sum"
    )
    counted = (labels != ignore_index).sum()
    factor = comm.world_size if gradients == "mean" else 1
    return cast("Tensor", _GlobalMean.apply(own, counted, comm, factor))


class _GlobalMean(torch.autograd.Function):
    """Forward: the sum over all ranks / the count over all ranks. Backward: this rank's part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counted: Tensor, comm: Comm, factor: int) -> Tensor:
        # fp64 counts tokens exactly; fp32 stops at 2 ** 24.
        totals = torch.stack([own.double(), counted.double()])
        comm.sum(totals)
        number = totals[1].clamp(min=1)
        ctx.weight = (factor / number).float()
        return (totals[0] / number).float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.weight, None, None, None
