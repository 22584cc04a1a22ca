"""``ringray.deal``: who holds which rows of a batch, for its mask.

What it returns stands wherever a partition is named. Code that is compiled takes it as a name and a
tensor, so that a graph holds for any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringray.attention.call import DEFAULTS, mistake, read, whole
from ringray.attention.documents import boundaries, document_boundaries
from ringray.base.units import plain
from ringray.partition import BALANCED, PARTITIONS, Partitioning
from ringray.traffic import deal as deals
from ringray.traffic.deal import Deal
from ringray.traffic.mask import Mask, Window


def deal(
    seq_len: int,
    world_size: int,
    *,
    cu_seqlens: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    causal: bool = True,
    window: Window = None,
    chunk: int | None = None,
    prefix: int | Sequence[int] | None = None,
    shared_prefix: int | None = None,
    global_tokens: int | None = None,
    partition: str | Sequence[int] | Tensor = BALANCED,
    weights: Sequence[float] | None = None,
) -> Deal:
    """Returns the rows of every rank, dealt for a mask: equal rows, and as even work as it allows.

    Every rank makes it from the same arguments, and gives it to all calls of the batch as
    ``partition``: to ``shard``, ``ring_attention`` (best with ``transport="direct"``) and the
    others. It needs no process group, so a data loader can make it ahead.

    A document goes to one rank, where it sends nothing, if that leaves the others even work; else
    it is shared by just enough ranks, each with an early and a late part of it: multiples of the
    kernels' tiles where the room of a rank allows.

    Args:
        seq_len: tokens of the sequence.
        world_size: ranks of the ring.
        cu_seqlens, causal, window, chunk, prefix, shared_prefix, global_tokens: the mask, as in
            ``ring_attention``. Calls have to have the same, except that layers may see less by a
            window or chunk where the deal has none.
        partition: ``balanced``; or another partition, for its figures; or positions as PyTorch's
            load balancers list them: rank r holds the r-th of equal parts, which ascends.
        weights: speed of each rank; a rank's work is in proportion to its weight, its rows are as
            many as those of others. None: all are equal.

    Returns:
        Deal: frozen, hashable and picklable. ``ranges(rank)`` are a rank's positions, with those
        from ``seq_len`` on as padding; ``balance`` is the mean time of a rank over the longest;
        ``rows_received`` the K/V rows that each rank needs from others; ``documents(rank)`` the
        numbers of the documents with tokens on a rank; ``indices()`` a list for PyTorch's load
        balancers.

    Raises:
        ValueError: sizes, masks or weights that are none, or positions that are not each one once.
    """
    for name, value in (("seq_len", plain(seq_len)), ("world_size", plain(world_size))):
        if not whole(value, 1):
            raise ValueError(f"{name}: got {value!r}, expected an integer of at least 1")
    settings: dict[str, Any] = {"causal": causal, "window": window, "chunk": chunk}
    settings |= {"prefix": prefix, "shared_prefix": shared_prefix, "global_tokens": global_tokens}
    settings = read({**settings, "seq_len": seq_len})
    if wrong := mistake({**DEFAULTS, **settings}):
        raise ValueError(wrong)
    bounds = boundaries(cu_seqlens)
    batch = len(bounds) if isinstance(bounds, Tensor) and bounds.dim() == 2 else 1
    mask = Mask(**settings, documents=document_boundaries(bounds, batch))
    world_size = plain(world_size)
    speeds = deals.speeds(weights, world_size)
    if isinstance(partition, str):
        return deals.deal(mask, world_size, partition, speeds)
    indices = partition.tolist() if isinstance(partition, Tensor) else partition
    return deals.of_indices(indices, mask, world_size, speeds)


def spoken(partition: Partitioning) -> tuple[str, Tensor | None]:
    """Returns a partition as operators take it: its name, and for a deal the tensor that names it.
    A compiler traces this."""
    if not isinstance(partition, Deal):
        return partition, None  # type: ignore[return-value]  # the operator refuses what it is not
    if partition.rule in PARTITIONS:
        return partition.rule, None
    return BALANCED, torch.as_tensor(partition.token, dtype=torch.int64, device="cpu")


def heard(name: str, token: Tensor | None) -> Partitioning:
    """Returns the inverse of ``spoken``."""
    return name if token is None else deals.by_digest(int(token))
