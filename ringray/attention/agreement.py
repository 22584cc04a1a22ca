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
from functools import cached_property
from typing import Any

from torch._C import _DisableFuncTorch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _StopRecomputationError

from ringray.base.errors import PeerError, settle, settled
from ringray.comm.ring import Comm
from ringray_kernels.modes import transforming

_REJECTED = -1


class AgreedCall:
    """A call of a public function, or its backward pass: ``values`` by name that all ranks must
    have in common. Tensors among them are digests."""

    def __init__(self, function: str, **values: Any) -> None:
        self.function, self.values = function, values

    @cached_property
    def digests(self) -> list[int]:
        """Of the function and its values: 0 for what other functions have beyond these."""
        digests = [*map(_digest, (self.function, *self.values.values()))]
        assert len(digests) <= _WIDTH
        return digests + [0] * (_WIDTH - len(digests))

    @cached_property
    def fingerprint(self) -> int:
        """56 bits that tell a call from all others."""
        return int.from_bytes(hashlib.sha256(repr(self.digests).encode()).digest()[:7], "big")

    def but(self, **values: Any) -> AgreedCall:
        """Returns the same call with other values."""
        return AgreedCall(self.function, **{**self.values, **values})


BACKWARD = "a backward pass"  # its value: the number of the call that it belongs to
_FUNCTIONS = (
    "ring_attention", "unshard", "shift", "sharded_cross_entropy", "sharded_linear_cross_entropy",
    "shard_batch", "ring_decode", "a step of generate", "the end of generate", BACKWARD,
    "make_mesh", "parallelize", "offload", "a step", "answers", "checkpoints", "save", "wait",
    "load", "check of a model", "a forward in maybe_context_parallel",
    "clip_grad_norm", "token_log_probs", "token_entropy", "token_top_k",
)  # fmt: skip
_WIDTH = 40  # numbers in the vector of digests: the function, and its values
_ORDER = "every rank must make the same calls, and run their backward passes, in the same order"
_HINTS = {
    "call": _ORDER,
    "dropout_seed": "give the same dropout_seed on every rank, or the same torch.manual_seed "
    "before: its generator on the CPU draws the seeds",
    "weights": "make the model after the same torch.manual_seed, or load its weights on every rank",
}
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


def agree(comm: Comm, call: AgreedCall | None) -> int:
    """Compares ``call`` over all ranks; a rank whose arguments are refused passes None.

    Returns:
        The number of this call, the same on every rank and larger than all before it on this ring.

    Raises:
        ValueError: on every rank, naming the ranks, the values and how they differ.
    """
    if comm.world_size == 1 or _THREAD.alone or not enabled():
        return 0
    if call is not None and transforming():
        with refusing(comm):
            raise ValueError(
                f"{call.function}: got a call within a transform of torch.func or forward-mode "
                "AD, expected one outside: ranks communicate in it; torch.autograd has gradients"
            )
    about = "agreement" if call is None else f"agreement about {call.function}"
    mark = _REJECTED if call is None else call.fingerprint
    # Maxima of the mark and of its negative: both are of one number only if all marks are equal.
    highest, lowest, latest = comm.largest((mark, -mark, _latest[0]), about)
    _latest[0] = 1 + latest
    if highest != -lowest:  # rare, so that only now all values are exchanged
        digests = [_REJECTED] * _WIDTH if call is None else call.digests
        everyone = comm.gather_integers(digests, about)
        if call is not None and (error := _difference(comm.rank, call, everyone)):
            settle(error)
            raise error
    return _latest[0]


def _difference(rank: int, call: AgreedCall, everyone: list[list[int]]) -> ValueError | None:
    """Returns what ``agree`` raises where ranks differ."""
    name = call.function
    rejecting = [other for other, digests in enumerate(everyone) if digests[0] == _REJECTED]
    if rejecting:
        return RefusedError(
            f"{name}: rank {rank} is ready, but the arguments of rank(s) {_list(rejecting)} were "
            "refused, or what it computes first has failed; the error is raised there",
            "user-error",
        )
    functions = {_digest(function): function for function in _FUNCTIONS}
    mine = everyone[rank]
    others = [other for other, digests in enumerate(everyone) if digests[0] != mine[0]]
    if others:
        return ValueError(
            f"{name}: ranks disagree about what they do: {name} here (rank {rank}), "
            f"{functions.get(everyone[others[0]][0], 'another')} there (rank(s) {_list(others)}); "
            f"{_ORDER}"
        )
    differing = []
    for i, (field, value) in enumerate(call.values.items(), 1):
        others = [other for other, digests in enumerate(everyone) if digests[i] != mine[i]]
        if others:
            theirs = everyone[others[0]][i]
            named = theirs < 1 << 40 and isinstance(value, int)
            differing.append(
                f"{field}: {_brief(value)} here (rank {rank}), "
                f"{theirs if named else 'another'} there (rank(s) {_list(others)})"
            )
    if not differing:
        return None
    hints = [_HINTS[x] for x in (text.partition(":")[0] for text in differing) if x in _HINTS]
    what = "; ".join([*differing, *hints])
    return ValueError(f"{name}: ranks disagree about the problem: {what}")


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


@contextmanager
def refusing(comm: Comm, *, once: bool = False) -> Iterator[None]:
    """Tells the other ranks if the body raises.

    The other ranks already wait in the exchange of the call, so a rank that fails before takes part
    in it. The body may agree itself: what all ranks know they are not told again. ``once``: when it
    has agreed, the other ranks wait no more, and an error (of what autograd saves) is its own.
    """
    latest = _latest[0]
    try:
        yield
    except _StopRecomputationError:  # a checkpoint has computed again what it needs
        raise
    except Exception as error:
        if not settled(error) and not (once and _latest[0] > latest):
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
