"""Compares predicted times of calls, products and collectives with tables of measured ones.

    python experiments/measured/check.py FOLDER
    python experiments/measured/check.py --leave-out

FOLDER holds any of ``attention_causal.csv``, ``attention_full.csv``, ``attention_mla.csv``,
``products.csv`` and ``collectives.csv``, in the columns that ``pack.py`` reads. Times are predicted
by the functions that plans use. ``--leave-out``: without some rows, heads and sizes of the packed
tables, it predicts those; measured points then are twice as far apart as they are in plans.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pack

from ringray.lab.predict import collectives, hardware, measured, products, rates
from ringray.lab.predict.hardware import Fleet, Hardware
from ringray.lab.predict.measured import calls

DTYPE = "bfloat16"
ITEMSIZE = 2

# What a round leaves out: a kind, and whether a time of a curve at a place is.
ATTENTION = ("causal", "full", "mla")
LEFT_OUT: dict[str, tuple[tuple[str, ...], Callable[[tuple[int, ...], int], bool]]] = {
    "rows 2048": (ATTENTION, lambda curve, at: at == 2048),
    "rows 512, 4096": (ATTENTION, lambda curve, at: at in (512, 4096)),
    "heads 16": (ATTENTION, lambda curve, at: curve[2] == 16),
    "heads 4, 32": (ATTENTION, lambda curve, at: curve[2] in (4, 32)),
    "m 1024, 8192": (("product",), lambda curve, at: at in (1024, 8192)),
    "n 4096": (("product",), lambda curve, at: curve[0] == 4096),
    "k 4096": (("product",), lambda curve, at: curve[1] == 4096),
    "elements 4^5, 4^7, ..., 4^13": (
        ("all_gather", "reduce_scatter", "all_reduce", "alltoall"),
        lambda curve, at: at in [4**power for power in (5, 7, 9, 11, 13)],
    ),
}


def entry(system: str) -> Hardware:
    """Returns the first entry of hardware with the tables of a system."""
    return next(one for one in hardware.table().values() if one.tables == system)


def predicted(time: pack.Time) -> float:
    """Returns the predicted milliseconds of a measured call."""
    on = entry(time.system)
    if time.kind == "product":
        n, k = time.curve
        return 1e3 * products.seconds(on, DTYPE, time.at, k, n)
    if time.kind not in ATTENTION:
        (ranks,) = time.curve
        fleet = Fleet(time.system, on, 1, max(ranks, on.ranks_per_node))
        operation: collectives.Operation = time.kind  # type: ignore[assignment]
        return 1e3 * collectives.seconds(fleet, operation, ranks, time.at * ITEMSIZE)
    head_dim, window, heads, kv_heads = time.curve
    rows = np.full(1, float(time.at))
    value_dim = pack.MLA[1] if time.kind == "mla" else head_dim
    pairs = rows * rows if time.kind == "full" else rows * (rows + 1) / 2
    if window:
        keys = np.minimum(rows, window)
        pairs = rows * keys - keys * (keys - 1) / 2
    curves = rates.find(
        on, DTYPE, head_dim, "forward", heads=heads, kv_heads=kv_heads, value_dim=value_dim
    )
    flops = 2.0 * (head_dim + value_dim) * heads * pairs
    (seconds,) = curves.seconds(flops, rows, rows, pairs)
    return 1e3 * (float(seconds) + on.call)


def table(time: pack.Time) -> str:
    """Returns the name of the table that a time is of."""
    if time.kind in ATTENTION:
        window = " window" if time.kind == "causal" and time.curve[1] else ""
        return f"attention {time.kind}{window}"
    return "products" if time.kind == "product" else "collectives"


def packed() -> Iterator[pack.Time]:
    """Yields the times that predictions use."""
    for path in sorted(measured.FOLDER.glob("*.curves")):
        for kind, curves in measured.read(path.stem).items():
            for curve, seconds in curves.seconds.items():
                for point, time in zip(curves.at, seconds, strict=True):
                    yield pack.Time(path.stem, kind, curve, int(point), 1e3 * float(time), "")


def left_out() -> Iterator[tuple[pack.Time, float]]:
    """Yields each time that a round leaves out and its error."""
    everything, folder = list(packed()), measured.FOLDER
    for kinds, drops in LEFT_OUT.values():
        rest = [t for t in everything if t.kind not in kinds or not drops(t.curve, t.at)]
        with tempfile.TemporaryDirectory() as other:
            for system, text in pack.packed(rest).items():
                (Path(other) / f"{system}.curves").write_text(text, encoding="utf-8")
            measured.FOLDER = Path(other)
            _forget()
            yield from errors(t for t in everything if t.kind in kinds and drops(t.curve, t.at))
        measured.FOLDER = folder
    _forget()


def _forget() -> None:
    for function in (
        measured.read, calls.nearest, rates.find, products.seconds, products.shapes
    ):  # fmt: skip
        function.cache_clear()


def errors(times: Iterable[pack.Time]) -> Iterator[tuple[pack.Time, float]]:
    """Yields each time and the relative error of its prediction, which has no sign."""
    for time in times:
        yield time, abs(predicted(time) / time.ms - 1)


def report(found: Iterable[tuple[pack.Time, float]]) -> Iterator[str]:
    """Yields lines: median and 90th percentile of the errors by table and system."""
    rows = list(found)
    yield f"{'table':26} {'system':20} {'rows':>6} {'median':>7} {'90% below':>10}"
    tables = sorted({table(time) for time, _ in rows})
    groups = {"attention": [t for t in tables if t.startswith("attention")]}
    for name in [*tables, "attention"]:
        members = groups.get(name, [name])
        of_table = [(time, far) for time, far in rows if table(time) in members]
        systems = sorted({time.system for time, _ in of_table})
        for system in [*systems, "all"] if of_table else []:
            far = [far for time, far in of_table if system in (time.system, "all")]
            median, ninth = np.quantile(far, (0.5, 0.9))
            yield f"{name:26} {system:20} {len(far):6} {median:7.1%} {ninth:10.1%}"


def main() -> None:
    """Prints the errors of a folder's tables, or of times that are left out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--leave-out", action="store_true")
    options = parser.parse_args()
    if options.leave_out == (options.folder is not None):
        parser.error("give a FOLDER or --leave-out")
    compared = left_out() if options.leave_out else errors(pack.read(options.folder))
    print("\n".join(report(compared)))


if __name__ == "__main__":
    main()
