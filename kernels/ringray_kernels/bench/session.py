"""One run of the benchmark: cases in sequence, with results printed and saved at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

import torch

from ringray_kernels.bench import contenders, machine, measure, report, targets
from ringray_kernels.bench.measure import Record
from ringray_kernels.bench.problems import Point, VirtualPoint
from ringray_kernels.bench.virtual import VirtualBench
from ringray_kernels.bench.watchdog import PATIENCE_S, Watchdog

# Points before the first virtual ring, which has a target.
_BEFORE_RINGS = 8


class BenchSession:
    """A run on ``device`` with the contenders ``names``, which also writes records to ``file``.

    It starts no case after ``minutes`` and ends the process after ``patience_s`` seconds without
    progress, see ``Watchdog``.
    """

    def __init__(
        self,
        device: torch.device,
        names: Sequence[str],
        file: TextIO | None,
        minutes: float,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.device, self.names, self.file = device, names, file
        self.device_name = machine.device_name(device)
        self.environment = machine.environment(device)
        self.minutes = minutes
        self.deadline = time.monotonic() + 60 * minutes
        self.records: list[Record] = []
        self.skipped: list[str] = []
        self.watchdog = Watchdog(patience_s, self._hung)
        self.case = ""

    def run(self, points: Sequence[Point], rings: Sequence[VirtualPoint]) -> bool:
        """Runs all cases and prints the summary. Returns False if one of our kernels is wrong or
        failed, a figure was refused, or the device was lost."""
        print(", ".join(f"{key} {value}" for key, value in self.environment.items() if value))
        bench = VirtualBench(self.device, self._peak("bfloat16"))
        if bench.peak is None:
            print(f"{self.device_name}: peak not known, figures are not checked against it")
        print(flush=True)
        fine = True
        try:
            with self.watchdog:
                self._run(bench, points, rings)
        except measure.DeviceLost as error:
            fine = False
            print(f"the device no longer responds, the rest is not measured: {error}\n")
        print("\n".join(targets.summary(self.records, self.device_name)))
        return self._ended() and fine

    def _run(
        self, bench: VirtualBench, points: Sequence[Point], rings: Sequence[VirtualPoint]
    ) -> None:
        later = {point: self._able_last(point) for point in points}
        first, rest = points[:_BEFORE_RINGS], points[_BEFORE_RINGS:]
        cases: list[Point | VirtualPoint] = [*first, *rings[:1], *rest, *rings[1:]]
        for case in cases:
            if isinstance(case, VirtualPoint):
                self._ring(bench, case)
            else:
                self._point(case, [name for name in self.names if name not in later[case]])
        for point, names in later.items():
            if names:
                beside = [name for name in self.names if name == "ringray"]
                self._point(point, [*beside, *names], kept=names)

    def _able_last(self, point: Point) -> list[str]:
        """Returns the contenders for ``point`` that are measured after all others."""
        return [
            name
            for name in self.names
            if name in contenders.LAST
            and contenders.CONTENDERS[name].unsupported(point, self.device) is None
        ]

    def _hung(self, doing: str) -> None:
        """Saves all results, in the watchdog's thread: the main thread does not return."""
        name = doing.rpartition(" ")[2]
        reason = f"no progress for {self.watchdog.patience_s:g} s while {doing}"
        print(f"\nHUNG: {self.case}: {reason}; the rest is not measured\n", flush=True)
        if name in self.names:
            self._keep([measure.Record(self.case, name, "failed", reason)], None)
        print("\n".join(targets.summary(self.records, self.device_name)))
        self._ended()
        sys.stdout.flush()

    def _peak(self, dtype: str) -> float | None:
        return machine.peak_tflops(self.device_name, dtype)

    def _say(self, text: str) -> None:
        """Prints the present step to stderr, which identifies a hang."""
        self.watchdog.mark(text)
        print(f"  ... {text}", file=sys.stderr, flush=True)

    def _point(self, point: Point, names: Sequence[str], kept: Sequence[str] | None = None) -> None:
        """Measures ``names`` at one point and keeps the records of ``kept``, by default all."""

        def measured() -> list[Record]:
            return measure.measure(
                point, names, self.device, self._say, peak=self._peak(point.dtype),
                mark=self.watchdog.mark,
            )  # fmt: skip

        if names:
            self._case(point.name, measured, report.table, kept)

    def _ring(self, bench: VirtualBench, ring: VirtualPoint) -> None:
        def lines(found: Sequence[Record]) -> list[str]:
            return [report.ring_line(record) for record in found]

        self._case(ring.label, lambda: bench.measure(ring, self._say), lines)

    def _case(
        self,
        name: str,
        measured: Callable[[], list[Record]],
        lines: Callable[[Sequence[Record]], list[str]],
        kept: Sequence[str] | None = None,
    ) -> None:
        if time.monotonic() > self.deadline:
            self.skipped.append(name if kept is None else f"{name} ({', '.join(kept)})")
            return
        self.case = name
        print(name, file=sys.stderr, flush=True)
        lost: measure.DeviceLost | None = None
        try:
            found = measured()
        except measure.DeviceLost as error:
            found, lost = error.records, error
        clocks = None if lost else machine.clocks(self.device)
        self._keep([one for one in found if kept is None or one.contender in kept], clocks)
        if found:
            print("\n".join(lines(found)) + "\n", flush=True)
        if lost:
            raise lost

    def _keep(self, found: Sequence[Record], clocks: dict[str, str] | None) -> None:
        """Keeps records and writes them to the file at once."""
        self.records += found
        if self.file is not None:
            for record in found:
                self.file.write(record.json(self.environment, clocks) + "\n")
            self.file.flush()

    def _ended(self) -> bool:
        """Prints skipped cases and failures; returns whether there are no failures."""
        if self.skipped:
            print(f"\nnot started within {self.minutes:g} minutes: {', '.join(self.skipped)}")
        bad = [
            f"{one.case} {one.contender}: {one.status}, {one.reason}"
            for one in self.records
            if one.status == "refused"
            or (one.contender.startswith("ringray") and one.status not in ("ok", "unsupported"))
        ]
        if bad:
            print("\nfailures:\n" + "\n".join(bad))
        return not bad
