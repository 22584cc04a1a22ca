"""Numbers with units in specs: times and sizes of memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from ringray.base import units
from ringray.lab.spec.fields import Kind, Mismatch


@dataclass(frozen=True)
class Quantity(Kind):
    """From ``low`` to ``high``: a number in the base unit, or a text of a number and a unit."""

    low: float
    high: float
    units: ClassVar[Mapping[str, float]]  # how many base units each is
    numbers: ClassVar[tuple[type, ...]]  # what is taken as a number of base units

    @property
    def _pattern(self) -> str:
        return rf"[0-9]{{1,9}}(\.[0-9]{{1,9}})? ?({'|'.join(self.units)})"

    def read(self, value: object) -> float:
        amount: Any = math.nan
        if isinstance(value, str) and (match := re.fullmatch(self._pattern, value)):
            unit = match[2]
            amount = float(value.removesuffix(unit)) * self.units[unit]
        elif type(value) in self.numbers:
            amount = value
        if not self.low <= amount <= self.high:  # NaN fails too
            raise Mismatch(self.expected)
        return float(amount)

    def schema(self) -> dict[str, Any]:
        kind = "number" if float in self.numbers else "integer"
        number = {"type": kind, "minimum": self.low, "maximum": self.high}
        return {"anyOf": [number, {"type": "string", "pattern": f"^{self._pattern}$"}]}


class Duration(Quantity):
    """A time, kept as float seconds."""

    units = units.SECONDS
    numbers = (int, float)

    @property
    def expected(self) -> str:
        low, high = _seconds(self.low), _seconds(self.high)
        return f"a duration from {low} to {high}, such as 500ms, 90s, 2m, 1h or a number of seconds"


class Size(Quantity):
    """An amount of memory, kept as whole bytes."""

    units = MappingProxyType({unit: units.BYTES[unit] for unit in ("MiB", "GiB", "TiB")})
    numbers = (int,)

    @property
    def expected(self) -> str:
        low, high = int(self.low) >> 20, int(self.high) >> 40
        return f"a size from {low}MiB to {high}TiB, such as 512MiB, 2GiB or a number of bytes"

    def read(self, value: object) -> int:
        return int(super().read(value))


def _seconds(seconds: float) -> str:
    if seconds and seconds % 3600 == 0:
        return f"{seconds / 3600:g}h"
    return f"{seconds:g}s"
