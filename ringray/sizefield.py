"""Sizes of memory in specs: bytes, or a number with MiB, GiB or TiB."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ringray.fields import Kind, Mismatch

_UNITS = {"MiB": 20, "GiB": 30, "TiB": 40}


@dataclass(frozen=True)
class Size(Kind):
    """An amount of memory from ``low`` to ``high`` bytes, kept as whole bytes."""

    low: int
    high: int

    @property
    def expected(self) -> str:
        low, high = self.low >> 20, self.high >> 40
        return f"a size from {low}MiB to {high}TiB, such as 512MiB, 2GiB or a number of bytes"

    def read(self, value: object) -> int:
        count = -1
        if isinstance(value, str):
            match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?(MiB|GiB|TiB)", value)
            if match:
                count = int(float(match[1]) * (1 << _UNITS[match[2]]))
        elif type(value) is int:
            count = value
        if not self.low <= count <= self.high:
            raise Mismatch(self.expected)
        return count

    def schema(self) -> dict[str, Any]:
        number = {"type": "integer", "minimum": self.low, "maximum": self.high}
        pattern = r"^[0-9]{1,9}(\.[0-9]{1,3})? ?(MiB|GiB|TiB)$"
        return {"anyOf": [number, {"type": "string", "pattern": pattern}]}
