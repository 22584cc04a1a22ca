"""One run of the benchmark: cases in sequence, with results printed and saved at once."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO, TypeVar

import torch

from ringray_kernels.bench import contenders, machine, measure, report
from ringray_kernels.bench.measure import Record
from ringray_kernels.bench.problems import Point, VirtualPoint
from ringray_kernels.bench.virtual import VirtualBench
from ringray_kernels.bench.watchdog import PATIENCE_S, Watchdog

Case = TypeVar("Case", bound=Point | VirtualPoint)


class BenchSession:
    """A run on ``device`` with the contenders ``names``, which also writes records to ``file``.

    It starts no case after ``minutes`` and ends the process after ``patience_s`` seconds without
    progress, see ``Watchdog``. It does not measure ``earlier``, the records of earlier runs, again.
    ``only``: texts in names of cases. ``staged``: it is one of several processes of a
    run, and writes more facts.
    """

    def __init__(
        self,
        device: torch.device,
        names: Sequence[str],
        file: TextIO | None,
        minutes: float,
        patience_s: float = PATIENCE_S,
        earlier: Sequence[Record] = (),
        *,
        only: Sequence[str] = ("",),
        staged: bool = False,
    ) -> None:
        self.device, self.names, self.file, self.staged = device, names, file, staged
        self.device_name = machine.device_name(device)
        self.environment = machine.environment(device)
        self.minutes = minutes
        self.deadline = time.monotonic() + 60 * minutes
        self.records = list(earlier)
        self._found = {(record.case, record.contender): record.status for record in earlier}
        self.only, self.check_only = only, False
        self.lost = False
        self.skipped: list[str] = []
        self.watchdog = Watchdog(patience_s, self._hung)
        self.case = ""

    def chosen(self, cases: Iterable[Case]) -> list[Case]:
        """Returns the cases with one of the texts ``only`` in a name of theirs."""
        return [x for x in cases if any(text in name for text in self.only for name in x.names)]

    def run(self, work: Callable[[BenchSession], bool | None]) -> bool:
        """Does ``work`` and prints the summary. Returns False if one of our kernels is wrong or
        failed, a figure was refused, or the device was lost; of a stage, if the work does."""
        if not self.staged:
            print(", ".join(f"{key} {value}" for key, value in self.environment.items() if value))
            if self._peak("bfloat16") is None:
                print(f"{self.device_name}: peak not known, figures are not checked against it")
            print(flush=True)
        fine: bool | None = True
        try:
            with self.watchdog:
                fine = work(self)
        except measure.DeviceLost as error:
            self.lost = True
            print(f"the device no longer responds, the rest is not measured: {error}\n")
        if not self.staged:
            fine = self.summary()
        elif self.skipped:
            self.fact("not started in time", cases=self.skipped)
        return fine is not False and not self.lost

    def summary(self) -> bool:
        """Prints skipped cases and failures; returns whether there are figures and no failures."""
        if self.skipped:
            print(f"\nnot started within {self.minutes:g} minutes: {', '.join(self.skipped)}")
        bad = [
            f"{record.case} {record.contender}: {record.status}, {record.reason}"
            for record in self.records
            if record.status == "refused"
            or (contenders.is_ours(record.contender) and record.status not in ("ok", "unsupported"))
        ]
        if bad:
            print("\nfailures:\n" + "\n".join(bad))
        if not (measured := any(record.median_ms for record in self.records)):
            print("\nnothing was measured")
        return measured and not bad

    def fact(self, fact: str, **values: Any) -> None:
        """Prints a fact that is no figure of a contender, and writes it to the file."""
        self.watchdog.mark(fact)
        print(f"{fact}: {', '.join(f'{k} {v}' for k, v in values.items())}", flush=True)
        self._write(json.dumps({"fact": fact, **values}))

    def measure(self, points: Sequence[Point], rings: Sequence[VirtualPoint] = ()) -> None:
        """Measures all contenders at ``points``, and ``rings``."""
        self.points(points, [name for name in self.names if name not in contenders.LAST])
        bench = VirtualBench(self.device, self._peak("bfloat16"))
        for ring in rings:
            self._ring(bench, ring)
        self.last(points)

    def last(self, points: Sequence[Point]) -> None:
        """Measures the contenders that come after all others, one after the other."""
        for name in filter(self.names.__contains__, contenders.LAST):
            self.points(points, [name])

    def _hung(self, doing: str) -> None:
        """Saves all results, in the watchdog's thread: the main thread does not return."""
        name = doing.rpartition(" ")[2]
        reason = f"no progress for {self.watchdog.patience_s:g} s while {doing}"
        print(f"\nHUNG: {self.case}: {reason}; the rest is not measured\n", flush=True)
        if name in self.names:
            self._keep([measure.Record(self.case, name, "failed", reason)], None)
        if not self.staged:
            self.summary()
        sys.stdout.flush()

    def _peak(self, dtype: str) -> float | None:
        return machine.peak_tflops(self.device_name, dtype)

    def _say(self, text: str) -> None:
        """Prints the present step to stderr, which identifies a hang."""
        self.watchdog.mark(text)
        print(f"  ... {text}", file=sys.stderr, flush=True)

    def points(self, points: Iterable[Point], names: Sequence[str]) -> None:
        """Measures those of ``names`` that are new at the chosen ones of ``points``; beside those
        of others ours once more, whose second figures are only in the table."""
        for point in self.chosen(points):
            self._point(point, names)

    def _point(self, point: Point, names: Sequence[str]) -> None:
        new = [name for name in names if (point.name, name) not in self._found]
        every = contenders.CONTENDERS
        able = [name for name in new if every[name].unsupported(point, self.device) is None]
        well = self._found.get((point.name, "ringray"), "ok") == "ok"
        well &= not all(map(contenders.is_ours, able))
        beside = [name for name in self.names if well and name == "ringray" and name not in new]

        def measured() -> list[Record]:
            both, peak = [*beside, *new], self._peak(point.dtype)
            options: dict[str, Any] = {"mark": self.watchdog.mark, "check_only": self.check_only}
            return measure.measure(point, both, self.device, self._say, peak=peak, **options)

        if able or (new and not self._found):
            self._case(point.name, measured, report.table, new)

    def _ring(self, bench: VirtualBench, ring: VirtualPoint) -> None:
        def lines(records: Sequence[Record]) -> list[str]:
            return [report.ring_line(record) for record in records]

        if any((ring.name(way), "ringray") not in self._found for way in ("forward", "backward")):
            self._case(ring.label, lambda: bench.measure(ring, self._say), lines)

    def _case(
        self,
        name: str,
        measured: Callable[[], list[Record]],
        lines: Callable[[Sequence[Record]], list[str]],
        names: Sequence[str] | None = None,
    ) -> None:
        if time.monotonic() > self.deadline:
            self.skipped.append(name if names is None else f"{name} ({', '.join(names)})")
            return
        self.case = name
        print(name, file=sys.stderr, flush=True)
        lost: measure.DeviceLost | None = None
        try:
            records = measured()
        except measure.DeviceLost as error:
            records, lost = error.records, error
        clocks = None if lost else machine.clocks(self.device)
        self._keep([x for x in records if names is None or x.contender in names], clocks)
        if records:
            print("\n".join(lines(records)) + "\n", flush=True)
        if lost:
            raise lost

    def _keep(self, records: Sequence[Record], clocks: dict[str, str] | None) -> None:
        """Keeps records and writes them to the file at once."""
        self.records += records
        for record in records:
            self._write(record.json(self.environment, clocks))

    def _write(self, line: str) -> None:
        if self.file is not None:
            print(line, file=self.file, flush=True)
