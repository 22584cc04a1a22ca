"""Faults as plain data: kinds, ranks at fault, messages, consequences."""

from __future__ import annotations

import pytest

from ringray.base.errors import PeerError
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec
from ringray.lab.trial import faults
from ringray.lab.trial.faults import Fault


class DistBackendError(RuntimeError):
    """As torch.distributed's."""


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def compiler(module: str, name: str = "SomeError") -> Exception:
    return type(name, (Exception,), {"__module__": module})("no code for that")


CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 268435456 bytes. Error code 12 (Cannot allocate memory)"
)
GPU = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 79.11 GiB"


@pytest.mark.parametrize(
    ("error", "kind", "secondhand"),
    [
        (RuntimeError(CPU), "out-of-memory", False),
        (OutOfMemoryError(GPU), "out-of-memory", False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "out-of-memory", False),
        (DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), "out-of-memory", False),
        (compiler("triton.compiler.errors", "CompilationError"), "compile-error", False),
        (RuntimeError("[127.0.0.1]:4711: Connection closed by peer"), "connection-lost", True),
        (DistBackendError("NCCL error"), "connection-lost", True),
        (PeerError("another rank", "out-of-memory"), "out-of-memory", True),
        (ValueError("heads: got 3"), "user-error", False),
        (RuntimeError("something else"), "error", False),
    ],
)
def test_exceptions_have_kinds(error: Exception, kind: str, secondhand: bool) -> None:
    found = faults.of_exception(error, 3)
    assert (found.kind, found.secondhand, found.ranks) == (kind, secondhand, (3,))


@pytest.mark.parametrize(
    ("text", "count"),
    [(CPU, 268435456), (GPU, int(20.5 * 2**30)), ("no memory", None)],
)
def test_what_was_asked_for_is_read(text: str, count: int | None) -> None:
    assert faults.asked(text) == count


@pytest.mark.parametrize(
    ("kind", "status", "again"),
    [
        ("rank-died", "failed", True), ("stalled", "failed", True), ("node-lost", "failed", True),
        ("node-preempted", "failed", True),
        ("connection-lost", "failed", True), ("out-of-memory", "oom", False),
        ("timeout", "timeout", False), ("compile-error", "failed", False),
        ("mismatch", "failed", False), ("user-error", "failed", False), ("error", "failed", False),
    ],
)  # fmt: skip
def test_only_the_infrastructure_is_tried_again(kind: str, status: str, again: bool) -> None:
    fault = Fault(kind)  # type: ignore[arg-type]
    assert (fault.status, fault.infrastructure) == (status, again)


def of(kind: str, rank: int, secondhand: bool = False, node_id: str = "") -> Fault:
    return Fault(kind, f"{kind} of {rank}", (rank,), node_id=node_id, secondhand=secondhand)  # type: ignore[arg-type]


def test_the_cause_is_named_and_not_what_followed() -> None:
    broken = {rank: of("connection-lost", rank, secondhand=True) for rank in (0, 2)}
    assert faults.cause({**broken, 1: of("rank-died", 1)}).ranks == (1,)
    assert faults.cause({**broken, 1: of("error", 1)}).kind == "error"
    short = {1: of("out-of-memory", 1), 0: of("out-of-memory", 0, secondhand=True)}
    assert faults.cause(short) == short[1]
    assert faults.cause({**short, 2: of("rank-died", 2)}).kind == "out-of-memory"
    assert faults.cause(broken).ranks == (0, 2)


def test_ranks_that_died_together_are_named_together() -> None:
    dead = {r: of("rank-died", r, node_id="a" if r < 2 else "b") for r in range(4)}
    assert faults.cause(dead).ranks == (0, 1)


def test_one_line_for_the_user() -> None:
    fault = Fault(
        "out-of-memory", "RuntimeError: ...", (0,), "10.0.0.2 (node 1f)", "1f00", "repeat 2",
        asked_bytes=3 << 29, free_bytes=600 << 20, limit_bytes=2 << 30,
    )  # fmt: skip
    assert str(fault) == (
        "rank 0 on 10.0.0.2 (node 1f), in repeat 2: out of memory: asked 1.50 GiB, 600 MiB free "
        "when that was refused, limits.rank_memory 2.00 GiB"
    )
    assert str(Fault("mismatch", "error beyond the budget")) == "error beyond the budget"
    died = Fault("rank-died", "killed", tuple(range(12)), "10.0.0.2")
    assert str(died) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 ... on 10.0.0.2: died: killed"
    assert "\n" not in faults.of_exception(RuntimeError("a\nb\n\nc"), 0).message


def test_logs_lose_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hush-hush-hush")
    text = ":job_id:01\n\n\x1b[31mfetching\x1b[0m http://me:pw@host/\nwith hush-hush-hush\n"
    assert faults.tail(text) == ("fetching http://***@host/", "with ***")
    many = faults.tail("\n".join(f"{i} {'x' * 999}" for i in range(100)))
    assert len(many) == faults.LOG_LINES
    assert many[-1].startswith("99 ")
    assert all(len(line) <= 200 for line in many)


TRIAL = """\
version: 1
name: a
kind: {kind}
ring: {{size: 4, device: cpu}}
problem: {{seq_len: {seq_len}}}
measure: {{repeats: 5, baseline: {baseline}}}
"""


def deadline(
    seq_len: object = 64, timeout: str = "2h", kind: str = "latency", baseline: str = "null"
) -> plan.Deadline:
    """The deadline under a limit that is a default."""
    text = TRIAL.format(kind=kind, seq_len=seq_len, baseline=baseline)
    (trial,) = plan.build(spec.parse(text)).trials
    given = spec.parse(f"{text}limits: {{trial_timeout: {timeout}}}\n")
    given.limits.model_fields_set.discard("trial_timeout")
    return plan.deadline(trial, given.limits)


def test_deadlines_follow_the_plan() -> None:
    assert deadline().seconds == plan.DEADLINE_FLOOR_S
    assert deadline(timeout="5s").seconds == 5.0
    small, large, beside = (
        deadline(length, "24h", baseline=baseline).seconds
        for length, baseline in (("16k", "null"), ("32k", "null"), ("16k", "sdpa"))
    )
    assert plan.DEADLINE_FLOOR_S < small < large < 86400
    assert small < beside
    assert deadline("4k", "24h").seconds < deadline("4k", "24h", kind="correctness").seconds
    assert deadline("1M").seconds == 7200
