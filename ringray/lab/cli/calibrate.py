"""``calibrate``: measures this machine, for predictions that hold here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ringray.base import provenance, units
from ringray.lab.cli.options import Option, Output, options, write
from ringray.lab.predict import calibration
from ringray.lab.report import words

if TYPE_CHECKING:
    from ringray.lab.predict.hardware import Hardware


@options(
    Option("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU"),
    Output("--json", metavar="F", help="write what was measured to F, too; - is stdout"),
)
def calibrate(arguments: argparse.Namespace) -> int:
    """Measures this machine, keeps what it found for ``--on local``, and prints it."""
    from ringray.lab.calibrate import machine

    usual: calibration.Device = "cuda" if provenance.hardware()["gpus"] else "cpu"
    device: calibration.Device = arguments.device or usual
    say = partial(print, "calibrate:", file=sys.stderr, flush=True)
    place = calibration.write(machine.measure(device, say), device)
    if arguments.json is not None:
        write("--json", arguments.json, place.read_text(encoding="utf-8"))
        if arguments.json == "-":
            return 0
    entry, _ = calibration.find(device)
    assert entry is not None, "it has just been written"
    _print(entry)
    print(f"\n`ringray plan SPEC --on local` predicts with it; kept in {place}")
    return 0


def _print(entry: Hardware) -> None:
    from ringray.lab.report import tables

    console = tables.console()
    rows = sorted({n for curve in entry.attention for n in curve.rates})
    unit, scale = ("GFLOP/s", 1e9) if entry.cores else ("TFLOP/s", 1e12)
    console.print(f"{entry.title}: {unit} of one rank's attention, by the rows of a call\n")
    texts = ("dtype", "pass", "visible keys")
    table = tables.bare_table(*texts, "head dim", *map(str, rows), texts=texts)
    for curve in entry.attention:
        seen = "up to itself" if curve.causal else "in steps" if curve.stepped else "all"
        rates = (units.digits(curve.rates[n] / scale) if n in curve.rates else "" for n in rows)
        name = words.value("dtype", curve.dtype)
        table.add_row(name, curve.direction, seen, str(curve.head_dim), *rates)
    tables.show(table, console)
    peaks = (f"{words.value('dtype', n)} {units.digits(x / scale)}" for n, x in entry.peak.items())
    console.print(f"\nproducts   {', '.join(peaks)} {unit}; large ones reach {entry.products:.0%}")
    for name, text in _facts(entry):
        console.print(f"{name:<11}{text}", soft_wrap=True)


def _facts(entry: Hardware) -> Iterator[tuple[str, str]]:
    """Yields a name and a text for each number beside the rates."""
    link = entry.inner
    yield "memory", f"{units.digits(entry.memory_bandwidth / 1e9)} GB/s, read and written"
    yield "links", f"{units.bandwidth(link.bandwidth)}, {units.latency(link.latency)} latency"
    yield "overheads", f"{units.latency(entry.op)} a pass, {units.latency(entry.call)} a call"
    if entry.cores is not None:
        each = f"{units.latency(entry.step)} a step, {units.latency(entry.message)} a message"
        yield "handling", f"{each}, {units.digits(entry.copying * 1e9)} s per GB, of cores"
        threads = (f"; {n} threads are {units.ratio(x)} of one" for n, x in entry.threads.items())
        beside = f"{entry.cores}; beside others {entry.shared:.0%} of a rank"
        yield "cores", beside + "".join(threads)
    yield "spread", f"{entry.spread:.1%}, half of the 80% interval"
