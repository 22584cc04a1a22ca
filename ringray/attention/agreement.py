"""Ranks that disagree about a problem learn it before the first hop, instead of hanging in one.

Every call of the op exchanges one small vector of digests; a rank whose own arguments are wrong
takes part too, and says so. ``RINGRAY_AGREEMENT=0`` in the environment of *all* ranks turns it off,
for production runs whose shapes are settled.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ringray.base.errors import PeerError
from ringray.base.provenance import version

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ringray.comm.ring import Comm

_REJECTED = -1
_FIELDS = 18  # the signature's fields and the version


class RefusedError(PeerError, ValueError):
    """The arguments of another rank were refused."""


def enabled() -> bool:
    """Whether ranks check that they agree."""
    return os.environ.get("RINGRAY_AGREEMENT", "1") != "0"


def _digest(value: Any) -> int:
    """Small integers stand for themselves, so that a message can name them."""
    if isinstance(value, int) and 0 <= value < 1 << 40:
        return int(value)
    return (1 << 40) + int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:5], "big")


def agree(
    comm: Comm, signature: dict[str, Any] | None, error: Exception | None, *, device: torch.device
) -> None:
    """Compare ``signature`` over all ranks; a rank that has an ``error`` passes None.

    Raises:
        ValueError: on every rank, naming the ranks, the fields and the values that differ.
    """
    if comm.world_size == 1 or not enabled():
        return
    if signature is None:
        comm.gather_integers([_REJECTED] * _FIELDS, device)
        return
    fields = {**signature, "version": version()}
    assert len(fields) == _FIELDS
    everyone = comm.gather_integers([_digest(value) for value in fields.values()], device)
    rejecting = [rank for rank, values in enumerate(everyone) if values[0] == _REJECTED]
    if rejecting:
        raise RefusedError(
            f"ring_attention: rank {comm.rank} is ready, but the arguments of rank(s) "
            f"{_list(rejecting)} were refused; the error is raised there",
            "user-error",
        )
    mine = everyone[comm.rank]
    differing = []
    for i, (name, value) in enumerate(fields.items()):
        others = [rank for rank, values in enumerate(everyone) if values[i] != mine[i]]
        if others:
            theirs = everyone[others[0]][i]
            said = (
                f"{theirs} there"
                if theirs < 1 << 40 and isinstance(value, int)
                else "another there"
            )
            differing.append(
                f"{name}: {_brief(value)} here (rank {comm.rank}), {said} (rank(s) {_list(others)})"
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
    """For callers of the op that check or compute before it: the others must not wait for a rank
    that fails there, so whatever is raised inside also takes part in the call's one exchange."""
    try:
        yield
    except Exception as error:
        agree(comm, None, error, device=device)
        raise
