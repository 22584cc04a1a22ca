"""Units of time and memory, and amounts in words."""

from __future__ import annotations

import math

ABSENT = "–"
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def digits(number: float | None, suffix: str = "") -> str:
    """Three significant digits and never an exponent; a dash for what is not known."""
    if number is None or number != number:
        return ABSENT
    size = abs(number)
    if size >= 100:
        return f"{number:,.0f}{suffix}"
    places = 2 if size == 0 else min(2 - math.floor(math.log10(size)), 6)
    return f"{number:.{places}f}{suffix}"


def memory(count: float) -> str:
    """Bytes in the unit that fits: ``512 B``, ``1.50 GiB``."""
    unit = max((unit for unit in BYTES if BYTES[unit] <= count), key=BYTES.__getitem__, default="B")
    return f"{count:.0f} B" if unit == "B" else f"{digits(count / BYTES[unit])} {unit}"
