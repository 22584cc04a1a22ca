"""Faults of a ring: their kinds, and how exceptions and logs show them. Plain data.

Infrastructure faults say nothing about a trial; every other fault is its result. Imports neither
torch nor ray.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ringray.base.errors import PeerError
from ringray.base.redaction import shown
from ringray.base.units import BYTES, memory
from ringray.lab.trial.outcome import Status

Kind = Literal[
    "out-of-memory",
    "node-preempted",
    "node-lost",
    "rank-died",
    "stalled",
    "compile-error",
    "user-error",
    "error",
    "mismatch",
    "timeout",
    "connection-lost",
]


class _Meaning(NamedTuple):
    """``says``: in messages; ``infrastructure``: another attempt may succeed; ``status``: of a
    trial that ends with it."""

    says: str = ""
    infrastructure: bool = False
    status: Status = "failed"


# Of simultaneous faults, the first of these is the cause of the others.
_KINDS: dict[Kind, _Meaning] = {
    "out-of-memory": _Meaning("out of memory", status="oom"),
    "node-preempted": _Meaning("preempted with its node", infrastructure=True),
    "node-lost": _Meaning("lost with its node", infrastructure=True),
    "rank-died": _Meaning("died", infrastructure=True),
    "stalled": _Meaning("stalled", infrastructure=True),
    "compile-error": _Meaning("could not compile"),
    "user-error": _Meaning(),
    "error": _Meaning(),
    "mismatch": _Meaning(),
    "timeout": _Meaning(status="timeout"),
    "connection-lost": _Meaning("lost the connection to another rank", infrastructure=True),
}
GONE = "node-preempted", "node-lost"  # kinds of faults that end a node
LOG_LINES = 10
_LINE = 200  # characters of a log line, or of a message in one
_MESSAGE = 500  # characters of a recorded message


@dataclass(frozen=True)
class Fault:
    """The reason why a trial has no result.

    ``message``: without rank and place; ``ranks``: those at fault, not those that waited for them;
    ``node``: if all of them are on one, ``node_id`` as Ray names it; ``hop``: position in the
    trial; ``log``: the last lines of the rank. Of memory, in bytes: the refused request, the free
    memory after the refused call had released its own, and ``limits.rank_memory``. ``secondhand``:
    only shows that another rank failed.
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
        """Tells whether another attempt may succeed."""
        return _KINDS[self.kind].infrastructure

    @property
    def status(self) -> Status:
        """Returns the status of a trial that ended with this fault."""
        return _KINDS[self.kind].status

    def __str__(self) -> str:
        """Returns one line for the user."""
        listed = ", ".join(map(str, self.ranks[:8])) + " ..." * (len(self.ranks) > 8)
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {listed}" if self.ranks else ""
        node = f"on {self.node}" if self.node else ""
        hop = f"in {self.hop}" if self.hop else ""
        head = " ".join(filter(None, [ranks, ", ".join(filter(None, [node, hop]))]))
        cut = self.message[:_LINE] + "..." * (len(self.message) > _LINE)
        detail = (self.kind == "out-of-memory" and self._memory()) or cut
        return ": ".join(filter(None, [head, _KINDS[self.kind].says, detail]))

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
        """Returns the known fields, ready for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name != "secondhand" and value not in (None, "", ())
        }


def of_exception(error: BaseException, rank: int) -> Fault:
    """Returns the fault that an exception on ``rank`` shows by its type and text."""
    text = f"{type(error).__name__}: {error}"
    message = brief(text)
    if isinstance(error, PeerError):
        return Fault(error.kind, message, (rank,), secondhand=True)
    if out_of_memory(error):
        return Fault("out-of-memory", message, (rank,), asked_bytes=asked(text))
    kinds = [kind for link in _chain(error) if (kind := _kind(link))]
    if "compile-error" in kinds:
        return Fault("compile-error", message, (rank,))
    if kinds:
        return Fault("connection-lost", message, (rank,), secondhand=True)
    return Fault("user-error" if isinstance(error, ValueError) else "error", message, (rank,))


# Texts of the allocators of the CPU, of CUDA, and of libraries with their own, in lower case.
_NO_MEMORY = re.compile(
    r"can't allocate memory|bad_alloc|(cuda|hip) error: out of memory|cuda out of memory|"
    r"(cublas|cudnn)_status_alloc_failed|cuda failure( 2)? 'out of memory'"
)
_BROKEN = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|socket timeout|"
    r"remote process exited|ncclremoteerror"
)


class BudgetError(MemoryError):
    """Tensors of ``peak`` bytes beyond a budget, which were allocated all the same."""

    def __init__(self, peak: int, budget: int) -> None:
        self.budget = budget
        super().__init__(
            f"tensors of {memory(peak)}, more than limits.rank_memory {memory(budget)}"
        )


def out_of_memory(error: BaseException) -> bool:
    """Tells whether an exception reports a failed allocation."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or _NO_MEMORY.search(text) is not None
        or (isinstance(error, OSError) and "cannot allocate memory" in text)
    )


def log_says_out_of_memory(log: Iterable[str]) -> bool:
    """Tells whether the last lines of a dead process report a failed allocation."""
    words = r"bad_alloc|cannot allocate memory|memoryerror|thread creation failed"
    return any(re.search(words, line, re.IGNORECASE) for line in log)


def _chain(error: BaseException | None) -> list[BaseException]:
    """Returns an exception and its causes, each once."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__
    return seen


def _kind(error: BaseException) -> Kind | None:
    """Recognises errors of compilers, and broken connections: a peer failed."""
    modules = ("triton.compiler", "triton.runtime.errors", "torch._dynamo", "torch._inductor")
    names = ("CompilationError", "OutOfResources", "PTXASError")
    for type_ in type(error).__mro__:
        if type_.__module__.startswith(modules) or type_.__name__ in names:
            return "compile-error"
    of_group = type(error).__name__.startswith("Dist")
    return "connection-lost" if of_group or _BROKEN.search(str(error).lower()) else None


def cause(faults: Mapping[int, Fault]) -> Fault:
    """Returns the cause of simultaneous faults (by rank, at least one), with all its ranks."""
    direct = [fault for fault in faults.values() if not fault.secondhand]
    direct = direct or list(faults.values())
    kind = min((fault.kind for fault in direct), key=list(_KINDS).index)
    alike = [fault for fault in direct if fault.kind == kind]
    first = min(alike, key=lambda fault: fault.ranks)
    if kind == "out-of-memory":
        return first
    together = [fault for fault in alike if fault.node_id == first.node_id]
    return replace(first, ranks=tuple(sorted(rank for fault in together for rank in fault.ranks)))


_BYTES = {name.lower(): count for name, count in BYTES.items()} | {"bytes": 1, "kb": 1 << 10}


def asked(text: str) -> int | None:
    """Returns the bytes that an allocator's error names."""
    size = re.search(r"allocate ([0-9.]+) ?(bytes|[KMGT]i?B)", text, re.IGNORECASE)
    if size is None or size[2].lower() not in _BYTES:
        return None
    return int(float(size[1].rstrip(".")) * _BYTES[size[2].lower()])


def brief(text: str) -> str:
    """Returns the first lines of a text as one, shortened, without credentials."""
    lines = [line.strip() for line in text[: 4 * _MESSAGE].splitlines() if line.strip()]
    return _clean(" ".join(lines[:4]))[:_MESSAGE]


def tail(text: str) -> tuple[str, ...]:
    """Returns the last lines of a log, shortened, without credentials and Ray's own marks."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(
        _clean(line)[:_LINE] for line in lines if not line.startswith((":job_id", ":actor_name"))
    )[-LOG_LINES:]


def _clean(text: str) -> str:
    return re.sub(r"\s", " ", shown(re.sub(r"\x1b\[[0-9;]*m", "", text)))


def stale(faults: Sequence[Mapping[str, Any]], rank_memory: int | None) -> bool:
    """Tells whether a lack of memory, the last of a trial's recorded ``faults``, was met under
    another ``limits.rank_memory`` than now."""
    last = faults[-1] if faults else {}
    return last.get("kind") == "out-of-memory" and last.get("limit_bytes") != rank_memory
