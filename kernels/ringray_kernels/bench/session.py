"""One run of the benchmark: case after case, printed and written down as results come."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from ringray_kernels.bench import machine, measure, report, targets
from ringray_kernels.bench.virtual import VirtualBench

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ringray_kernels.bench.measure import Record
    from ringray_kernels.bench.problems import Point, VirtualPoint

# The first virtual ring, which has a target, comes after as many points.
_BEFORE_RINGS = 8


class Session:
    """Measures on ``device`` with the contenders ``names``; records go to ``file`` too, if given.
    No case is started after ``minutes``."""

    def __init__(
        self, device: torch.device, names: Sequence[str], file: TextIO | None, minutes: float
    ) -> None:
        self.device, self.names, self.file = device, names, file
        self.device_name = machine.device_name(device)
        self.environment = machine.environment(device)
        self.minutes = minutes
        self.deadline = time.monotonic() + 60 * minutes
        self.records: list[Record] = []
        self.skipped: list[str] = []

    def run(self, points: Sequence[Point], rings: Sequence[VirtualPoint]) -> bool:
        """Everything, then the summary. False if one of our kernels is wrong or failed, a figure
        was refused, or the device was lost."""
        print(", ".join(f"{key} {value}" for key, value in self.environment.items() if value))
        bench = VirtualBench(self.device, self._peak("bfloat16"))
        if bench.peak is None:
            print(f"{self.device_name}: peak not known, no figure is held against it")
        print(flush=True)
        fine = True
        try:
            for point in points[:_BEFORE_RINGS]:
                self._point(point)
            for ring in rings[:1]:
                self._ring(bench, ring)
            for point in points[_BEFORE_RINGS:]:
                self._point(point)
            for ring in rings[1:]:
                self._ring(bench, ring)
        except measure.DeviceLost as error:
            fine = False
            print(f"the device answers no more, the rest is not measured: {error}\n")
        print("\n".join(targets.summary(self.records, self.device_name)))
        return self._ended() and fine

    def _peak(self, dtype: str) -> float | None:
        return machine.peak_tflops(self.device_name, dtype)

    def _say(self, text: str) -> None:
        """What is being done now, on stderr: if something hangs, it is known what."""
        print(f"  ... {text}", file=sys.stderr, flush=True)

    def _point(self, point: Point) -> None:
        def measured() -> list[Record]:
            peak = self._peak(point.dtype)
            return measure.measure(point, self.names, self.device, self._say, peak=peak)

        self._case(point.name, measured, report.table)

    def _ring(self, bench: VirtualBench, ring: VirtualPoint) -> None:
        def lines(found: Sequence[Record]) -> list[str]:
            return [report.ring_line(record) for record in found]

        self._case(ring.label, lambda: bench.measure(ring, self._say), lines)

    def _case(
        self,
        name: str,
        measured: Callable[[], list[Record]],
        lines: Callable[[Sequence[Record]], list[str]],
    ) -> None:
        if time.monotonic() > self.deadline:
            self.skipped.append(name)
            return
        print(name, file=sys.stderr, flush=True)
        found = measured()
        clocks = machine.clocks(self.device)
        self.records += found
        if self.file is not None:
            for record in found:
                self.file.write(record.json(self.environment, clocks) + "\n")
            self.file.flush()
        print("\n".join(lines(found)) + "\n", flush=True)

    def _ended(self) -> bool:
        """Says what was left out and what went wrong; whether nothing did."""
        if self.skipped:
            print(f"\nnot started within {self.minutes:g} minutes: {', '.join(self.skipped)}")
        bad = [
            f"{one.case} {one.contender}: {one.status}, {one.reason}"
            for one in self.records
            if one.status == "refused"
            or (one.contender.startswith("ringray") and one.status not in ("ok", "unsupported"))
        ]
        if bad:
            print("\nnot as it should be:\n" + "\n".join(bad))
        return not bad
