"""One point: checks of all contenders, and interleaved timing of the right ones."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ringray_kernels.bench import checks, machine, timing
from ringray_kernels.bench.checks import CheckResult
from ringray_kernels.bench.contenders import CONTENDERS, Results, Unsupported, is_ours
from ringray_kernels.bench.problems import Point, is_headline, make_sets

Status = Literal["ok", "wrong", "refused", "unsupported", "oom", "failed"]
# Long calls vary less and leave no time for many of them.
_LONG_FLOPS = 1e13
_REPEATS = 2  # of the first call, compared bitwise
_BURST_MS = 300.0  # long enough for the device's clocks and power to settle
_REASON_LENGTH = 300


class DeviceLost(Exception):
    """The device no longer responds, so all later calls would fail. ``records``: those of the case
    so far."""

    def __init__(self, reason: str, records: Iterable[Record] = ()) -> None:
        super().__init__(reason)
        self.records = list(records)


@dataclass
class Record:
    """One contender at one case. Times in milliseconds per call.

    ``share``: largest error over its limit, at most 1 if right; ``errors``: relative, by tensor;
    ``more``: fields of some cases only.
    """

    case: str
    contender: str
    status: Status
    reason: str | None = None
    flops: float | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    tflops: float | None = None
    share: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def json(self, environment: dict[str, Any], clocks: dict[str, str] | None) -> str:
        """Returns one JSON line; NaN and infinity become text, since JSON lacks them."""
        content = asdict(self)
        content |= content.pop("more")
        line = json.dumps({**content, "clocks": clocks, "environment": environment})
        return json.dumps(json.loads(line, parse_constant=lambda name: str(float(name))))


def earlier(path: Path, here: dict[str, Any]) -> list[Record]:
    """Returns the latest records of ``path`` that a run in the environment ``here`` would repeat.

    Ours: by the same sources and compiler; the others: by the same torch and cuDNN.
    """
    latest: dict[tuple[str, str], Record] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            other = json.loads(line)
            there, _ = other.pop("environment"), other.pop("clocks")
            values = {x.name: other.pop(x.name) for x in fields(Record) if x.name != "more"}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # another fact, or a line that was being written when its run was cut
        same = ("source", "triton") if is_ours(values["contender"]) else ("torch", "cudnn")
        # These may be free, or installed, by now.
        again = values["status"] in ("oom", "unsupported")
        if not again and all(there[key] == here[key] for key in ("device", *same)):
            values["share"] = values["share"] and float(values["share"])
            latest[values["case"], values["contender"]] = Record(**values, more=other)
    return list(latest.values())


def effort(point: Point, device: torch.device) -> timing.Effort:
    """Returns the number of samples of a point, decided in advance by its size alone."""
    if device.type == "cpu":
        return timing.Effort(rounds=2, sample_ms=0.5, burst_ms=1.0)
    burst_ms = _BURST_MS if is_headline(point) else 0.0
    return timing.Effort(20 if point.flops < _LONG_FLOPS else 7, burst_ms=burst_ms)


def failure(case: str, contender: str, error: BaseException) -> Record:
    """Returns the record of a contender that raised ``error``."""
    text = " ".join(str(error).split())[:_REASON_LENGTH]
    if isinstance(error, Unsupported):
        return Record(case, contender, "unsupported", text)
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return Record(case, contender, "oom", text)
    return Record(case, contender, "failed", f"{type(error).__name__}: {text}")


def free(device: torch.device, records: Iterable[Record]) -> None:
    """Frees memory.

    Raises:
        DeviceLost: an earlier error left the device unusable; with ``records``.
    """
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLost(str(error).partition("\n")[0], records) from error


def timed(
    case: str,
    contender: str,
    flops: float,
    verdict: CheckResult,
    result: timing.Timing | None,
    peak: float | None,
) -> Record:
    """Returns the record of a right contender, without a figure if that is impossible or none."""
    record = Record(case, contender, "ok", share=verdict.share, errors=verdict.errors)
    if result is None:
        return record
    record.flops = flops
    if refused := timing.above_peak(flops, result, peak):
        record.status, record.reason = "refused", refused
        return record
    record.median_ms, record.p20_ms, record.p80_ms = result.median_ms, result.p20_ms, result.p80_ms
    record.tflops = timing.tflops(flops, result.median_ms)
    record.more = {"calls_per_sample": result.calls}
    return record


def measure(
    point: Point,
    names: Sequence[str],
    device: torch.device,
    say: Callable[[str], None],
    *,
    peak: float | None,
    mark: Callable[[str], None] = lambda _: None,
    check_only: bool = False,
) -> list[Record]:
    """Returns one record for each of the contenders ``names``, in their order.

    ``say`` receives each step, ``mark`` each sample; ``peak``: the limit of figures in TFLOP/s,
    None for no limit; ``check_only``: nothing is timed.

    Raises:
        DeviceLost: this process can measure no more.
    """
    reasons = {name: CONTENDERS[name].unsupported(point, device) for name in names}
    unable = {name: reason for name, reason in reasons.items() if reason}
    records = {x: Record(point.name, x, "unsupported", reason) for x, reason in unable.items()}
    if able := [name for name in names if name not in records]:
        try:
            _measure(point, able, device, say, peak, mark, check_only, records)
        except DeviceLost:
            raise
        except Exception as error:  # for example no memory for the inputs
            failed = [name for name in able if name not in records]
            records |= {name: failure(point.name, name, error) for name in failed}
        free(device, records.values())
    return [records[name] for name in names]


class _Right(NamedTuple):
    """A contender with right results: its calls by set of inputs, and the results of the first if
    they must not change."""

    calls: list[Callable[[], Results]]
    verdict: CheckResult
    before: Results


def _measure(
    point: Point,
    names: Sequence[str],
    device: torch.device,
    say: Callable[[str], None],
    peak: float | None,
    mark: Callable[[str], None],
    check_only: bool,
    records: dict[str, Record],
) -> None:
    """Adds each record to ``records`` when it is complete."""
    case = point.name
    say("inputs and reference")
    cache = 0 if check_only else machine.cache_bytes(device)
    sets = make_sets(point, device, cache, machine.memory_bytes(device))
    want = checks.reference(point, sets[0])
    ready: dict[str, _Right] = {}
    for name in names:
        say(f"checking {name}")
        contender = CONTENDERS[name]
        try:
            first = contender.prepare(point, sets[0])
            results = first()
            verdict = checks.check(results, want, point.torch_dtype, quantized=contender.quantized)
            if verdict.reason is None:
                calls = [first, *(contender.prepare(point, inputs) for inputs in sets[1:])]
                ready[name] = _Right(calls, verdict, results if contender.deterministic else {})
            else:
                records[name] = Record(
                    case, name, "wrong", verdict.reason, share=verdict.share, errors=verdict.errors
                )
        except Exception as error:  # of any type, from any library: other contenders go on
            records[name] = failure(case, name, error)
        first = results = calls = None  # type: ignore[assignment]  # frees what is not timed
        free(device, records.values())
    say(f"timing {', '.join(ready) or 'none'}; {len(sets)} sets of inputs")
    calls_of = {} if check_only else {name: contender.calls for name, contender in ready.items()}
    timings = timing.interleaved(calls_of, device, effort(point, device), mark)
    for name, right in ready.items():
        mark(f"timing {name}")
        result = timings.get(name)
        try:
            if isinstance(result, Exception):
                raise result
            record = timed(case, name, point.flops, right.verdict, result, peak)
            records[name] = _after(record, right, effort(point, device).burst_ms, device)
        except Exception as error:
            records[name] = failure(case, name, error)


def _after(record: Record, right: _Right, burst_ms: float, device: torch.device) -> Record:
    """Returns ``record`` with the figures of a burst of calls without pauses; without any figures
    if results are no longer bitwise what they were: the kernel races."""
    if burst_ms and record.median_ms and record.flops:
        count = math.ceil(burst_ms / max(record.median_ms, 1e-3))
        each = timing.sample(right.calls, count, 0, device)
        rate = timing.tflops(record.flops, each)
        record.more |= {"sustained_ms": each, "sustained_tflops": rate}
    for _ in range(_REPEATS if right.before else 0):
        after = right.calls[0]()
        changed = [name for name, x in right.before.items() if not torch.equal(x, after[name])]
        if changed:
            reason = f"{', '.join(changed)} changed between calls"
            return Record(record.case, record.contender, "wrong", reason, share=record.share)
    return record
