"""Units of time and memory, and numbers as text with their unit."""

from __future__ import annotations

import math
from typing import Any

ABSENT = "–"
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
MIB, GIB = 1 << 20, 1 << 30  # bytes
BYTES = {"B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}


def digits(number: float | None, suffix: str = "") -> str:
    """Writes three significant digits without an exponent; a dash for None and NaN."""
    if number is None or number != number:
        return ABSENT
    size = abs(number)
    if size >= 100:
        return f"{number:,.0f}{suffix}"
    places = 2 if size == 0 else min(2 - math.floor(math.log10(size)), 6)
    return f"{number:.{places}f}{suffix}"


def memory(count: float) -> str:
    """Writes bytes in the largest unit with a value of at least one: ``512 B``, ``1.50 GiB``."""
    unit = max((unit for unit in BYTES if BYTES[unit] <= count), key=BYTES.__getitem__, default="B")
    return f"{count:.0f} B" if unit == "B" else f"{digits(count / BYTES[unit])} {unit}"


def plural(count: int, noun: str) -> str:
    """Writes a count with its noun: ``1 thread``, ``2 threads``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def ratio(number: float | None) -> str:
    """Writes a ratio of times with two decimals."""
    return ABSENT if number is None or number != number else f"{number:.2f}"


def share(number: float | None) -> str:
    """Writes a part of a whole in percent."""
    return ABSENT if number is None or number != number else f"{number:.0%}"


def mib(count: float | None) -> str:
    """Writes bytes as a number of MiB."""
    return ABSENT if count is None else "0" if count == 0 else digits(count / MIB)


def flops(count: float) -> str:
    """Writes FLOPs in the largest unit with a value of at least one."""
    amount = float(count)
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        if amount < 1000 or unit == "E":
            break
        amount /= 1000
    return f"{digits(amount) if unit else int(amount)} {unit}FLOP"


def duration(seconds: float) -> str:
    """Writes a time as ``840 ms``, ``12 s``, ``3:25``, ``1:02:05``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def bandwidth(rate: float) -> str:
    """Writes bytes/s as ``95.0 MB/s`` or ``1.20 GB/s``."""
    giga = rate >= 1e9
    return digits(rate / (1e9 if giga else 1e6), " GB/s" if giga else " MB/s")


def latency(seconds: float) -> str:
    """Writes seconds as ``85.0 µs`` or ``1.20 ms``."""
    milli = seconds >= 1e-3
    return digits(seconds * (1e3 if milli else 1e6), " ms" if milli else " µs")


def plain(value: Any) -> Any:
    """Returns a scalar of NumPy or torch as Python's number, and anything else as it is: also a
    scalar that requires a gradient, which would be lost."""
    if value is None or isinstance(value, int | float | str):  # all that a compiler traces
        return value
    if getattr(value, "ndim", None) != 0 or getattr(value, "requires_grad", False):
        return value
    return value.item()
