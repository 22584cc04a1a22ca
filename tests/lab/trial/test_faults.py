"""Faults as plain data: kinds, ranks at fault, messages, consequences."""

from __future__ import annotations

import json

import pytest

from ringray.base.errors import PeerError
from ringray.comm.batch import WaitScope
from ringray.instruments.progress import HERE, Progress, stacks, tail_of
from ringray.lab.plan import plan
from ringray.lab.ring.memory_limit import in_use
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
        (MemoryError(), "out-of-memory", False),
        (OSError(12, "Cannot allocate memory"), "out-of-memory", False),
        (RuntimeError("std::bad_alloc"), "out-of-memory", False),
        (RuntimeError("CUDA error: out of memory"), "out-of-memory", False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "out-of-memory", False),
        (DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), "out-of-memory", False),
        (compiler("triton.compiler.errors", "CompilationError"), "compile-error", False),
        (compiler("triton.runtime.errors", "OutOfResources"), "compile-error", False),
        (compiler("torch._dynamo.exc"), "compile-error", False),
        (compiler("torch._inductor.exc"), "compile-error", False),
        (RuntimeError("[127.0.0.1]:4711: Connection closed by peer"), "connection-lost", True),
        (RuntimeError("Timed out waiting 60000ms for recv operation"), "connection-lost", True),
        (DistBackendError("NCCL error"), "connection-lost", True),
        (PeerError("another rank", "out-of-memory"), "out-of-memory", True),
        (ValueError("heads: got 3"), "user-error", False),
        (RuntimeError("something else"), "error", False),
        (ZeroDivisionError("division by zero"), "error", False),
    ],
)
def test_exceptions_have_kinds(error: Exception, kind: str, secondhand: bool) -> None:
    found = faults.of_exception(error, 3)
    assert (found.kind, found.secondhand, found.ranks) == (kind, secondhand, (3,))


def test_an_error_of_a_compiler_counts_wherever_it_was_wrapped() -> None:
    outer = RuntimeError("a pass failed")
    outer.__cause__ = compiler("triton.compiler.errors")
    outer.__cause__.__cause__ = outer  # who knows
    assert faults.of_exception(outer, 0).kind == "compile-error"


@pytest.mark.parametrize(
    ("text", "count"),
    [(CPU, 268435456), (GPU, int(20.5 * 2**30)), ("tried to allocate 512.00 MiB.", 1 << 29),
     ("Unable to allocate 1.5 KiB for an array", 1536), ("no memory", None)],
)  # fmt: skip
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


def test_it_is_recorded_as_json() -> None:
    fault = Fault("rank-died", "killed", (1, 2), log=("last words",))
    assert json.loads(json.dumps(fault.as_dict())) == {
        "kind": "rank-died", "message": "killed", "ranks": [1, 2], "log": ["last words"],
    }  # fmt: skip


def test_logs_lose_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hush-hush-hush")
    text = ":job_id:01\n\n\x1b[31mfetching\x1b[0m http://me:pw@host/\nwith hush-hush-hush\n"
    assert faults.tail(text) == ("fetching http://***@host/", "with ***")
    many = faults.tail("\n".join(f"{i} {'x' * 999}" for i in range(100)))
    assert len(many) == faults.LOG_LINES
    assert many[-1].startswith("99 ")
    assert all(len(line) <= 200 for line in many)


def test_a_lack_of_memory_holds_for_its_limit() -> None:
    short = {"kind": "out-of-memory", "limit_bytes": 1 << 30}
    assert not faults.stale([short], 1 << 30)
    assert faults.stale([short], 2 << 30)
    assert faults.stale([short], None)
    assert not faults.stale([{"kind": "out-of-memory"}], None)
    assert not faults.stale([{"kind": "rank-died"}], 1 << 30)
    assert not faults.stale([], 1 << 30)


TRIAL = """\
version: 1
name: a
kind: {kind}
ring: {{size: 4, device: cpu}}
problem: {{seq_len: {seq_len}}}
measure: {{repeats: 5, baseline: {baseline}}}
"""


def until(seq_len: object = 64, timeout: str = "2h", kind: str = "latency", **more: str) -> float:
    return deadline(seq_len, timeout, kind, **more).seconds


def deadline(
    seq_len: object, timeout: str, kind: str = "latency", written: bool = False, **more: str
) -> plan.Deadline:
    """The deadline under a limit that is a default, or was ``written``."""
    text = TRIAL.format(kind=kind, seq_len=seq_len, baseline=more.get("baseline", "null"))
    (trial,) = plan.build(spec.parse(text)).trials
    given = spec.parse(f"{text}limits: {{trial_timeout: {timeout}}}\n")
    if not written:
        given.limits.model_fields_set.discard("trial_timeout")
    return plan.deadline(trial, trial.config, given.limits)


def test_deadlines_follow_the_plan() -> None:
    assert until() == plan.DEADLINE_FLOOR_S
    assert until(timeout="5s") == 5.0
    day = "24h"
    assert plan.DEADLINE_FLOOR_S < until("16k", day) < until("32k", day) < 86400
    assert until("16k", day) < until("16k", day, baseline="sdpa")
    assert until("4k", day) < until("4k", day, kind="correctness")
    assert until("1M", timeout="2h") == 7200


@pytest.mark.parametrize("kind", ["latency", "correctness", "overlap"])
@pytest.mark.parametrize(
    ("timeout", "seconds", "words"),
    [("5s", 5.0, "5.0 s"), ("30m", 1800.0, "30:00"), ("24h", 86400.0, "24:00:00")],
)
def test_a_limit_that_was_written_wins_over_predictions(
    kind: str, timeout: str, seconds: float, words: str
) -> None:
    for seq_len in (64, "4k"):
        end = deadline(seq_len, timeout, kind, written=True)
        assert end == (seconds, f"limits.trial_timeout: {words}")


def test_other_limits_are_named() -> None:
    """Also those of a plan, which has a default where the spec has none."""
    assert deadline("64", "2h").limit.startswith("50 × the predicted ")
    assert deadline("1M", "2m").limit == "limits.trial_timeout is 2:00 by default"
    text = TRIAL.format(kind="latency", seq_len="[64, 16k]", baseline="null")
    for limits, start in [
        ("", "50 × the predicted "),
        ("limits: {trial_timeout: null}\n", "50 × the predicted "),
        ("limits: {trial_timeout: 10m}\n", "limits.trial_timeout: 10:00"),
    ]:
        made = plan.build(spec.parse(text + limits))
        first = made.trials[0]
        assert plan.deadline(first, first.config, made.spec.limits).limit.startswith(start)


def test_a_rank_tells_how_far_it_is() -> None:
    here = Progress()
    assert str(here) == ""
    here.enter("inputs")
    here.enter("repeat 3")
    here.hop = "forward, step 1"
    copy = here.now()
    here.enter("repeat 4")
    assert (str(copy), str(here)) == ("repeat 3, forward, step 1", "repeat 4")


def test_a_rank_tells_that_it_waits() -> None:
    HERE.enter("inputs")
    copy = HERE.now()
    with WaitScope("a hop"):
        assert HERE.waiting
        assert not copy.waiting
    assert not HERE.waiting
    with pytest.raises(ZeroDivisionError), WaitScope("a hop"):
        _ = 1 / 0
    assert HERE.waiting, "what failed while waiting still shows"
    HERE.enter("")


def test_stacks_are_those_of_the_others() -> None:
    import threading

    told: list[str] = []
    beside = threading.Thread(target=lambda: told.append(stacks()))
    beside.start()
    beside.join()
    assert "test_stacks_are_those_of_the_others" in told[0]
    assert "stacks()" not in told[0].split("thread MainThread")[0]


def test_the_end_of_a_log(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "log"
    path.write_bytes(b"\xff" + b"x" * 10000 + b"end")
    assert tail_of(str(path)).endswith("xend")
    assert len(tail_of(str(path))) == 8192
    assert tail_of(str(tmp_path / "none")) == ""


def test_memory_in_use_follows_what_is_taken() -> None:
    before = in_use()
    held = bytearray(64 << 20)
    assert in_use() - before >= 60 << 20
    del held
