"""Agreement of all ranks about a problem before the first hop, so that none waits for a message
that another does not send, or takes one that belongs to another pass.

Every public function that communicates, and their backward passes, exchange one fingerprint of
their values, through host memory: no rank waits for its device. Where fingerprints differ, a vector
of digests follows, one for each value, from which each rank says what differs. A rank that raises
before, because its arguments are wrong or its own part fails, takes part with a fingerprint and a
vector that say so (``refusing``). Calls are numbered, and a backward pass names the call that it
belongs to.
``RINGRAY_AGREEMENT=0`` in the environment of *all* ranks turns it off, for production runs whose
shapes are known to agree.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch._C import _DisableFuncTorch
from torch.utils._python_dispatch import _disable_current_modes

from ringray.base.errors import PeerError, settle, settled
from ringray.comm.ring import Comm
from ringray_kernels.modes import transforming

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
    global_tokens: int | None
    seq_len: int
    cu_seqlens: tuple[Any, ...] | None
    scale: float
    softcap: float | None
    dropout_p: float
    dropout_seed: int | None
    quantized: bool
    sinks: bool
    alibi_slopes: tuple[tuple[float, ...], ...] | None
    distance_bias: int | None
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
    gradients: str
    requires_grad: bool


class Averaging(NamedTuple):
    """The values of one loss that all ranks must have in common. ``features``: of the rows of
    ``function``'s first argument."""

    function: str
    features: int
    dtype: str
    ignore_index: int
    gradients: str


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
    value_dim: int
    dtype: str
    length: int
    capacity: int
    dealt: int
    partition: str
    scale: float
    softcap: float | None
    sinks: bool
    window: int | None
    global_tokens: int | None
    backend: str
    version: str | None


class Stepping(NamedTuple):
    """The values of one step of ``huggingface.generate`` that all ranks must have in common.

    ``input_ids`` is a digest.
    """

    model: str
    length: int
    input_ids: str


class BackwardPass(NamedTuple):
    """A backward pass. ``call``: the number of the forward pass that it belongs to."""

    call: int


class Calling(NamedTuple):
    """A call of a function of few values. ``settings``: those that all ranks must have in
    common."""

    function: str
    settings: str


Agreed = Signature | Joining | Averaging | Dealing | Decoding | Stepping | BackwardPass | Calling
_OPERATIONS = {
    Signature: "ring_attention", Joining: "unshard", Averaging: "sharded_cross_entropy",
    Dealing: "shard_batch", Decoding: "ring_decode", Stepping: "a step of generate",
    BackwardPass: "a backward pass",
}  # fmt: skip
_NAMES = (
    *_OPERATIONS.values(), "sharded_linear_cross_entropy", "make_mesh", "parallelize", "a step",
    "answers", "save", "wait", "load", "the end of generate", "check of a model",
)  # fmt: skip
_WIDTH = 1 + len(Signature._fields)  # operation, values
_ORDER = "every rank must make the same calls, and run their backward passes, in the same order"
_SEEDS = (
    "give the same dropout_seed on every rank, or the same torch.manual_seed before: its generator "
    "on the CPU draws the seeds"
)
_latest = [0]  # number of this process's last call, in any ring


class _ThreadState(threading.local):
    """State of this thread. ``alone``: no other rank makes its calls."""

    alone = False


_THREAD = _ThreadState()


@contextmanager
def alone() -> Iterator[None]:
    """Lets this thread call in the block what others do not: ranks neither agree nor are told."""
    _THREAD.alone = True
    try:
        yield
    finally:
        _THREAD.alone = False


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


def _name(signature: Agreed) -> str:
    """Returns the name of an operation, for messages."""
    return getattr(signature, "function", None) or _OPERATIONS[type(signature)]


def _digests(signature: Agreed) -> list[int]:
    """Returns the digests of an operation and its values."""
    return [_digest(_name(signature)), *map(_digest, signature)]


def fingerprint(signature: Agreed) -> int:
    """Returns 56 bits that tell a signature from all others."""
    said = repr(_digests(signature)).encode()
    return int.from_bytes(hashlib.sha256(said).digest()[:7], "big")


def agree(comm: Comm, signature: Agreed | None, mark: int | None = None) -> int:
    """Compares ``signature`` over all ranks; a rank whose arguments are refused passes None.
    ``mark``: its fingerprint, if known.

    Returns:
        The number of this call, the same on every rank and larger than all before it on this ring.

    Raises:
        ValueError: on every rank, naming the ranks, the fields and the values that differ.
    """
    if comm.world_size == 1 or _THREAD.alone or not enabled():
        return 0
    if signature is not None and transforming():
        with refusing(comm):
            raise ValueError(
                f"{_name(signature)}: got a call within a transform of torch.func or forward-mode "
                "AD, expected one outside: ranks communicate in it; torch.autograd has gradients"
            )
    about = "agreement" if signature is None else f"agreement about {_name(signature)}"
    if signature is None or mark is None:
        mark = _REJECTED if signature is None else fingerprint(signature)
    highest, lowest, latest = comm.largest((mark, -mark, _latest[0]), about)
    _latest[0] = 1 + latest
    if highest != -lowest:
        digests = [_REJECTED] * _WIDTH if signature is None else _digests(signature)
        digests += [0] * (_WIDTH - len(digests))
        everyone = comm.gather_integers(digests, about)
        if signature is not None and (error := _difference(comm.rank, signature, everyone)):
            settle(error)
            raise error
    return _latest[0]


def _difference(rank: int, signature: Agreed, everyone: list[list[int]]) -> ValueError | None:
    """Returns what ``agree`` raises where ranks differ."""
    name = _name(signature)
    rejecting = [other for other, values in enumerate(everyone) if values[0] == _REJECTED]
    if rejecting:
        return RefusedError(
            f"{name}: rank {rank} is ready, but the arguments of rank(s) {_list(rejecting)} were "
            "refused, or what it computes first has failed; the error is raised there",
            "user-error",
        )
    operations = {_digest(one): one for one in _NAMES}
    mine = everyone[rank]
    others = [other for other, values in enumerate(everyone) if values[0] != mine[0]]
    if others:
        return ValueError(
            f"{name}: ranks disagree about what they do: {name} here (rank {rank}), "
            f"{operations.get(everyone[others[0]][0], 'another')} there (rank(s) {_list(others)}); "
            f"{_ORDER}"
        )
    differing = []
    for i, (field, value) in enumerate(signature._asdict().items(), 1):
        others = [other for other, values in enumerate(everyone) if values[i] != mine[i]]
        if others:
            theirs = everyone[others[0]][i]
            named = theirs < 1 << 40 and isinstance(value, int)
            differing.append(
                f"{field}: {_brief(value)} here (rank {rank}), "
                f"{theirs if named else 'another'} there (rank(s) {_list(others)})"
            )
    if not differing:
        return None
    hint = f"; {_ORDER}" if isinstance(signature, BackwardPass) else ""
    if differing[0].startswith("dropout_seed"):
        hint = f"; {_SEEDS}"
    return ValueError(f"{name}: ranks disagree about the problem: " + "; ".join(differing) + hint)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


@contextmanager
def refusing(comm: Comm) -> Iterator[None]:
    """Tells the other ranks if the body raises.

    The other ranks already wait in the exchange of the call, so a rank that fails before takes part
    in it. The body may agree itself: what all ranks know they are not told again.
    """
    try:
        yield
    except Exception as error:
        if not settled(error):
            # Transforms and modes would see the messages. A ring that is broken hides no error.
            with _DisableFuncTorch(), _disable_current_modes(), suppress(Exception):
                agree(comm, None)
            settle(error)
        raise


@contextmanager
def exchanging() -> Iterator[None]:
    """Marks errors of the body, during which the other ranks wait for messages."""
    try:
        yield
    except Exception as error:
        settle(error)
        raise
