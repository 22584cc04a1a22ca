"""Agreement of all ranks about a problem before the first hop, so that none waits for a message
that another does not send, or takes one that belongs to another pass.

``ring_attention``, ``unshard`` and the backward passes of both exchange one small vector of
digests, of the same length; a rank whose own arguments are wrong takes part with a vector that says
so. Calls are numbered, and a backward pass names the call that it belongs to.
``RINGRAY_AGREEMENT=0`` in the environment of *all* ranks turns it off, for production runs whose
shapes are known to agree.
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
    value_dim: int
    dtype: str
    partition: str
    causal: bool
    window: int | tuple[int | None, int | None] | None
    chunk: int | None
    prefix: tuple[int, ...] | None
    seq_len: int
    cu_seqlens: tuple[Any, ...] | None
    scale: float
    softcap: float | None
    sinks: bool
    transport: str
    backward: str
    backend: str
    blocks: str | int | None
    requires_grad: bool
    return_lse: bool
    version: str | None


class Joining(NamedTuple):
    """The values of one call of ``unshard`` that all ranks must have in common."""

    rows_per_rank: int
    shape: tuple[int, ...]
    dtype: str
    dim: int
    partition: str
    seq_len: int
    mean: bool


class Averaging(NamedTuple):
    """The values of one call of ``sharded_cross_entropy`` that all ranks must have in common."""

    factor: int


class Dealing(NamedTuple):
    """The values of one batch of ``huggingface.shard_batch`` that all ranks must have in common.

    Its tensors are digests.
    """

    model: str
    batch: int
    seq_len: int
    input_ids: str
    labels: str
    position_ids: str
    documents: tuple[Any, ...] | None
    partition: str
    gradients: str


class Decoding(NamedTuple):
    """The values of one call of ``ring_decode`` that all ranks must have in common."""

    batch: int
    heads: int
    kv_heads: int
    new_tokens: int
    head_dim: int
    dtype: str
    length: int
    capacity: int
    dealt: int
    partition: str
    scale: float
    window: int | None
    backend: str
    version: str | None


class BackwardPass(NamedTuple):
    """A backward pass. ``call``: the number of the forward pass that it belongs to."""

    call: int


Agreed = Signature | Joining | Averaging | Dealing | Decoding | BackwardPass
_OPERATIONS = {
    Signature: "ring_attention", Joining: "unshard", Averaging: "sharded_cross_entropy",
    Dealing: "shard_batch", Decoding: "ring_decode", BackwardPass: "a backward pass",
}  # fmt: skip
_WIDTH = 2 + len(Signature._fields)  # operation, call, values
_ORDER = "every rank must make the same calls, and run their backward passes, in the same order"
_latest = [0]  # number of this process's last call, in any ring


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


def agree(
    comm: Comm,
    signature: Agreed | None,
    *,
    device: torch.device,
) -> int:
    """Compares ``signature`` over all ranks; a rank whose arguments are refused passes None.

    Returns:
        The number of this call, the same on every rank and larger than all before it on this ring.

    Raises:
        ValueError: on every rank, naming the ranks, the fields and the values that differ.
    """
    if comm.world_size == 1 or not enabled():
        return 0
    if signature is None:
        comm.gather_integers([_REJECTED] * _WIDTH, device, "agreement")
        return 0
    name = _OPERATIONS[type(signature)]
    own = [_digest(name), _latest[0], *(_digest(value) for value in signature)]
    own += [0] * (_WIDTH - len(own))
    everyone = comm.gather_integers(own, device, f"agreement about {name}")
    rejecting = [rank for rank, values in enumerate(everyone) if values[0] == _REJECTED]
    if rejecting:
        raise RefusedError(
            f"{name}: rank {comm.rank} is ready, but the arguments of rank(s) "
            f"{_list(rejecting)} were refused; the error is raised there",
            "user-error",
        )
    _latest[0] = 1 + max(values[1] for values in everyone)
    _compare(comm.rank, name, signature, everyone)
    return _latest[0]


def _compare(
    rank: int,
    name: str,
    signature: Agreed,
    everyone: list[list[int]],
) -> None:
    operations = {_digest(one): one for one in _OPERATIONS.values()}
    mine = everyone[rank]
    others = [other for other, values in enumerate(everyone) if values[0] != mine[0]]
    if others:
        raise ValueError(
            f"{name}: ranks disagree about what they do: {name} here (rank {rank}), "
            f"{operations.get(everyone[others[0]][0], 'another')} there (rank(s) {_list(others)}); "
            f"{_ORDER}"
        )
    differing = []
    for i, (field, value) in enumerate(signature._asdict().items(), 2):
        others = [other for other, values in enumerate(everyone) if values[i] != mine[i]]
        if others:
            theirs = everyone[others[0]][i]
            named = theirs < 1 << 40 and isinstance(value, int)
            differing.append(
                f"{field}: {_brief(value)} here (rank {rank}), "
                f"{theirs if named else 'another'} there (rank(s) {_list(others)})"
            )
    if differing:
        hint = f"; {_ORDER}" if isinstance(signature, BackwardPass) else ""
        raise ValueError(
            f"{name}: ranks disagree about the problem: " + "; ".join(differing) + hint
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
