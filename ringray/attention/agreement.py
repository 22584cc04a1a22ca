"""Agreement of all ranks about a problem before the first hop, so that none waits for a message
that another does not send.

Every call of the op exchanges one small vector of digests; a rank whose own arguments are wrong
takes part with a vector that says so. ``RINGRAY_AGREEMENT=0`` in the environment of *all* ranks
turns it off, for production runs whose shapes are known to agree.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ringray.base.errors import PeerError
from ringray.comm.ring import Comm

_REJECTED = -1


class Signature(NamedTuple):
    """The values of one call that all ranks must have in common."""

    batch: int
    heads: int
    kv_heads: int
    rows_per_rank: int
    head_dim: int
    dtype: str
    partition: str
    causal: bool
    window: int | None
    seq_len: int
    cu_seqlens: tuple[int, ...] | None
    scale: float
    transport: str
    backward: str
    backend: str
    blocks: str | int | None
    requires_grad: bool
    version: str | None


class RefusedError(PeerError, ValueError):
    """The arguments of another rank were refused."""


def enabled() -> bool:
    """Returns whether ranks check that they agree."""
    return os.environ.get("RINGRAY_AGREEMENT", "1") != "0"


def _digest(value: Any) -> int:
    """Returns 41 bits for any value; small integers stand for themselves, so that a message can
    name them."""
    if isinstance(value, int) and 0 <= value < 1 << 40:
        return int(value)
    return (1 << 40) + int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:5], "big")


def agree(comm: Comm, signature: Signature | None, *, device: torch.device) -> None:
    """Compares ``signature`` over all ranks; a rank whose arguments are refused passes None.

    Raises:
        ValueError: on every rank, naming the ranks, the fields and the values that differ.
    """
    if comm.world_size == 1 or not enabled():
        return
    if signature is None:
        comm.gather_integers([_REJECTED] * len(Signature._fields), device)
        return
    everyone = comm.gather_integers([_digest(value) for value in signature], device)
    rejecting = [rank for rank, values in enumerate(everyone) if values[0] == _REJECTED]
    if rejecting:
        raise RefusedError(
            f"ring_attention: rank {comm.rank} is ready, but the arguments of rank(s) "
            f"{_list(rejecting)} were refused; the error is raised there",
            "user-error",
        )
    mine = everyone[comm.rank]
    differing = []
    for i, (name, value) in enumerate(signature._asdict().items()):
        others = [rank for rank, values in enumerate(everyone) if values[i] != mine[i]]
        if others:
            theirs = everyone[others[0]][i]
            named = theirs < 1 << 40 and isinstance(value, int)
            differing.append(
                f"{name}: {_brief(value)} here (rank {comm.rank}), "
                f"{theirs if named else 'another'} there (rank(s) {_list(others)})"
            )
    if differing:
        raise ValueError(
            "ring_attention: ranks disagree about the problem: " + "; ".join(differing)
        )


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


@contextmanager
def refusing(comm: Comm, device: torch.device) -> Iterator[None]:
    """Tells the other ranks if the body raises.

    For callers that check or compute before the op: the other ranks already wait in the exchange of
    the call, so a rank that fails takes part in it.
    """
    try:
        yield
    except Exception:
        agree(comm, None, device=device)
        raise
