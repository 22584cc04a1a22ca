"""Printed results: a table for each case, a line for a virtual ring."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray_kernels.bench.measure import Record

_COLUMNS = "  {:19} {:>10} {:>21} {:>9} {:>8} {:>7}  {}"


def _milliseconds(value: float) -> str:
    return f"{value:.4f}" if value < 10 else f"{value:.2f}"


def table(records: Sequence[Record]) -> list[str]:
    """Returns the table of one case, a line per contender. ``x ours``: its time over ringray's;
    ``error``: share of the limit, at most 1."""
    ours = next((r.median_ms for r in records if r.contender == "ringray"), None)
    lines = [
        records[0].case,
        _COLUMNS.format("", "median ms", "p20 - p80", "TFLOP/s", "x ours", "error", "").rstrip(),
    ]
    unable = [record for record in records if record.status == "unsupported"]
    for record in records:
        if record in unable:
            continue
        error = "" if record.share is None else f"{record.share:.2f}"
        if record.median_ms is None or record.p20_ms is None or record.p80_ms is None:
            note = f"{record.status}: {record.reason}" if record.reason else record.status
            lines.append(_COLUMNS.format(record.contender, "-", "-", "-", "-", error, note))
            continue
        ratio = f"{record.median_ms / ours:.2f}" if ours else "-"
        spread = f"{_milliseconds(record.p20_ms)} - {_milliseconds(record.p80_ms)}"
        rate = "-" if record.tflops is None else f"{record.tflops:.1f}"
        line = _COLUMNS.format(
            record.contender, _milliseconds(record.median_ms), spread, rate, ratio, error, ""
        )
        lines.append(line.rstrip())
    by_reason: dict[str | None, list[str]] = {}
    for record in unable:
        by_reason.setdefault(record.reason, []).append(record.contender)
    lines += [f"  unsupported: {', '.join(names)}: {why}" for why, names in by_reason.items()]
    return lines


def ring_line(record: Record) -> str:
    """Returns the line of a virtual ring."""
    if record.status != "ok" or record.median_ms is None:
        return f"{record.case}  {record.status}: {record.reason}"
    ring = record.more
    return (
        f"{record.case}  hops {_milliseconds(record.median_ms)} ms, one call "
        f"{_milliseconds(ring['whole_ms'])} ms, sum {ring['overhead']:.3f}, slowest rank "
        f"{ring['critical_path']:.4f} (1/N {ring['ideal']:.4f}), error {record.share or 0:.2f}"
    )
