"""What can go wrong with a ring, what is known of it, and what is done about it. Plain data.

Faults of the infrastructure say nothing about a trial: it is tried again, on a new generation,
after a pause, at most ``limits.retries`` times. Every other fault is what the trial has to tell: a
result, recorded at once. Imports neither torch nor ray.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ringray.base.errors import PeerError
from ringray.base.redaction import shown
from ringray.base.units import BYTES, memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ringray.lab.trial.outcome import Status

Kind = Literal[
    "node-lost", "rank-died", "stalled", "connection-lost",
    "out-of-memory", "timeout", "compile-error", "mismatch", "user-error", "error",
]  # fmt: skip

INFRASTRUCTURE: tuple[Kind, ...] = ("node-lost", "rank-died", "stalled", "connection-lost")
BACKOFF_S = 0.5  # before the first retry; doubled for each further one
BACKOFF_MOST_S = 30.0
LOG_LINES = 10
_LINE = 200  # characters of a log line, or of a message
_MESSAGE = 500
_STATUS: dict[str, Status] = {"out-of-memory": "oom", "timeout": "timeout"}
# Of several faults of one moment, the first of these is the cause of the others.
_CAUSES: tuple[Kind, ...] = (
    "out-of-memory", "node-lost", "rank-died", "stalled", "compile-error", "user-error", "error",
    "mismatch", "timeout", "connection-lost",
)  # fmt: skip
_SAID: dict[str, str] = {
    "rank-died": "died",
    "stalled": "gave no sign of life",
    "node-lost": "lost with its node",
    "connection-lost": "lost the connection to another rank",
    "out-of-memory": "out of memory",
    "compile-error": "could not compile",
}


@dataclass(frozen=True)
class Fault:
    """How a trial came to no result.

    ``message``: what happened, without who and where; ``ranks``: those at fault, not those that
    waited for them; ``node``: of the first of them, ``node_id`` as Ray names it; ``hop``: where in
    the trial; ``log``: the last lines of what the rank wrote. Of memory, in bytes: what was asked,
    what was free once the refused call had given back its own, and ``limits.rank_memory``.
    ``secondhand``: it only shows that another rank failed.
    """

    kind: Kind
    message: str = ""
    ranks: tuple[int, ...] = ()
    node: str = ""
    node_id: str = ""
    hop: str = ""
    log: tuple[str, ...] = ()
    asked_bytes: int | None = None
    free_bytes: int | None = None
    limit_bytes: int | None = None
    stacks: str = ""
    secondhand: bool = False

    @property
    def infrastructure(self) -> bool:
        """Whether another try may end otherwise."""
        return self.kind in INFRASTRUCTURE

    @property
    def status(self) -> Status:
        """Of a trial that ended with it."""
        return _STATUS.get(self.kind, "failed")

    def __str__(self) -> str:
        """One line for the user."""
        who = f"rank{'s' * (len(self.ranks) > 1)} {listed(self.ranks)}" if self.ranks else ""
        where = [f"on {self.node}"] * bool(self.node) + [f"in {self.hop}"] * bool(self.hop)
        head = " ".join([who, ", ".join(where)]) if where else who
        what = [said] if (said := _SAID.get(self.kind)) else []
        if self.kind == "out-of-memory" and (told := self._memory()):
            what.append(told)
        elif self.message:
            what.append(self.message[:_LINE] + "..." * (len(self.message) > _LINE))
        return ": ".join([*([head.strip()] if head.strip() else []), *what])

    def _memory(self) -> str:
        told = []
        if self.asked_bytes is not None:
            told.append(f"asked {memory(self.asked_bytes)}")
        if self.free_bytes is not None:
            told.append(f"{memory(self.free_bytes)} free when that was refused")
            if self.limit_bytes is not None:
                told.append(f"limits.rank_memory {memory(self.limit_bytes)}")
        return ", ".join(told)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; what is not known is left out."""
        flat = asdict(self)
        del flat["secondhand"]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in flat.items()
            if value not in (None, "", ())
        }


def backoff(attempt: int) -> float:
    """Seconds to wait after the ``attempt``-th try (from 1) ended with a fault."""
    return float(min(BACKOFF_MOST_S, BACKOFF_S * 2 ** (attempt - 1)))


def of_exception(error: BaseException, rank: int) -> Fault:
    """The fault that an exception on ``rank`` is, by its type and its text."""
    text = f"{type(error).__name__}: {error}"
    said = brief(text)
    if isinstance(error, PeerError):
        return Fault(error.kind, said, (rank,), secondhand=True)
    if out_of_memory(error):
        return Fault("out-of-memory", said, (rank,), asked_bytes=asked(text))
    kinds = [kind for one in _chain(error) if (kind := _kind(one))]
    if "compile-error" in kinds:
        return Fault("compile-error", said, (rank,))
    if kinds:
        return Fault("connection-lost", said, (rank,), secondhand=True)
    return Fault("user-error" if isinstance(error, ValueError) else "error", said, (rank,))


# Of the allocators of the CPU, of CUDA, and of the libraries that allocate for themselves.
_NO_MEMORY = (
    "can't allocate memory", "bad_alloc", "cuda error: out of memory", "hip error: out of memory",
    "cuda out of memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed",
    "cuda failure 'out of memory'", "cuda failure 2 'out of memory'",
)  # fmt: skip


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had."""
    text = str(error).lower()
    return (
        type(error).__name__ in ("OutOfMemoryError", "MemoryError", "_ArrayMemoryError")
        or any(word in text for word in _NO_MEMORY)
        or (isinstance(error, OSError) and "cannot allocate memory" in text)
    )


def log_says_out_of_memory(log: Iterable[str]) -> bool:
    """Whether the last words of a process were that it has no memory for more."""
    words = ("bad_alloc", "cannot allocate memory", "memoryerror", "thread creation failed")
    return any(word in line.lower() for line in log for word in words)


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__
    return seen


def _kind(error: BaseException) -> Kind | None:
    """Compilers have errors of their own; a broken connection means that a peer failed."""
    modules = ("triton.compiler", "triton.runtime.errors", "torch._dynamo", "torch._inductor")
    names = ("CompilationError", "OutOfResources", "PTXASError")
    for one in type(error).__mro__:
        if one.__module__.startswith(modules) or one.__name__ in names:
            return "compile-error"
    text = str(error).lower()
    broken = (
        "connection closed", "connection reset", "connection refused", "broken pipe", "timed out",
        "socket timeout", "remote process exited", "ncclremoteerror",
    )  # fmt: skip
    of_group = type(error).__name__.startswith("Dist")
    return "connection-lost" if of_group or any(word in text for word in broken) else None


def cause(faults: Mapping[int, Fault]) -> Fault:
    """Of what the ranks of a ring met at one moment (by rank, at least one), what the others
    followed from; it names all ranks of which it is true."""
    firsthand = [fault for fault in faults.values() if not fault.secondhand]
    kind = min((fault.kind for fault in firsthand or faults.values()), key=_CAUSES.index)
    alike = [fault for fault in firsthand or faults.values() if fault.kind == kind]
    first = min(alike, key=lambda fault: fault.ranks)
    if kind == "out-of-memory":
        return first
    together = [fault for fault in alike if fault.node_id == first.node_id]
    return replace(first, ranks=tuple(sorted(rank for one in together for rank in one.ranks)))


_BYTES = {name.lower(): count for name, count in BYTES.items()} | {"bytes": 1, "kb": 1 << 10}


def asked(text: str) -> int | None:
    """Bytes that an error of an allocator says were asked for."""
    found = re.search(r"allocate ([0-9.]+) ?(bytes|[KMGT]i?B)", text, re.IGNORECASE)
    if found is None or found[2].lower() not in _BYTES:
        return None
    return int(float(found[1].rstrip(".")) * _BYTES[found[2].lower()])


def listed(ranks: Sequence[int]) -> str:
    """``0, 1, 2 ...``, the first few."""
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def brief(text: str) -> str:
    """The first lines of a text as one, short, without what is nobody's business."""
    lines = [line.strip() for line in text[: 4 * _MESSAGE].splitlines() if line.strip()]
    return _clean(" ".join(lines[:4]))[:_MESSAGE]


def tail(text: str) -> tuple[str, ...]:
    """The last lines of a log, short, without Ray's own marks."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(
        _clean(line)[:_LINE] for line in lines if not line.startswith((":job_id", ":actor_name"))
    )[-LOG_LINES:]


def _clean(text: str) -> str:
    """As one line, for everybody's eyes."""
    return re.sub(r"\s", " ", shown(re.sub(r"\x1b\[[0-9;]*m", "", text)))


def stale(faults: Sequence[Mapping[str, Any]], rank_memory: int | None) -> bool:
    """Whether what a trial ran into is no longer there: it ended for want of memory (the last of
    its recorded ``faults``) under another ``limits.rank_memory`` than now."""
    last = faults[-1] if faults else {}
    return last.get("kind") == "out-of-memory" and last.get("limit_bytes") != rank_memory


class Nodes:
    """Which nodes rings fail on, over one run.

    A lost node is avoided at once: Ray may take a while to notice. One on which rings met
    ``STRIKES`` faults of the infrastructure is set aside, if fewer than ``CLEARS`` trials came to
    an end there between two of them.
    """

    STRIKES = 2
    CLEARS = 20

    def __init__(self) -> None:
        self._strikes: dict[str, int] = {}
        self._since: dict[str, int] = {}  # trials that ended there since the last strike
        self._aside: dict[str, None] = {}

    @property
    def aside(self) -> tuple[str, ...]:
        """Ray's ids of the nodes that get no more ranks."""
        return tuple(self._aside)

    def ended(self, nodes: Iterable[str]) -> None:
        """A trial came to a result on these."""
        for node in nodes:
            if node in self._strikes:
                self._since[node] = self._since.get(node, 0) + 1
                if self._since[node] >= self.CLEARS:
                    del self._strikes[node]

    def failed(self, fault: Fault) -> bool:
        """Whether the fault's node should be left alone from now on, if the ring fits elsewhere."""
        node = fault.node_id
        if not node or node in self._aside or not fault.infrastructure:
            return False
        self._strikes[node] = self._strikes.get(node, 0) + 1
        self._since[node] = 0
        return fault.kind == "node-lost" or self._strikes[node] >= self.STRIKES

    def set_aside(self, node: str) -> None:
        """Put no more ranks there."""
        self._aside[node] = None
