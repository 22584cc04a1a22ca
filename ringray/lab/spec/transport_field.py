"""``strategy.transport``: a transport's name, with its number where it takes one; or auto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringray.base.errors import suggestion
from ringray.lab.spec.fields import Kind, Mismatch
from ringray.transport import TRANSPORTS, parse


@dataclass(frozen=True)
class TransportKind(Kind):
    """``ring``, ``hybrid``, ``hybrid:2``, ..."""

    @property
    def expected(self) -> str:
        numbered = ", ".join(f"{name}:N" for name, one in TRANSPORTS.items() if one.parameter)
        return f"one of auto, {', '.join(TRANSPORTS)}, or {numbered}"

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise Mismatch(self.expected)
        if value == "auto":
            return value
        try:
            parse(value)
        except ValueError:
            name = value.partition(":")[0]
            hint = "" if name in TRANSPORTS else suggestion(name, ["auto", *TRANSPORTS])
            raise Mismatch(self.expected, hint=hint) from None
        return value

    def schema(self) -> dict[str, Any]:
        names = "|".join(
            f"{name}(:[1-9][0-9]{{0,4}})?" if one.parameter else name
            for name, one in TRANSPORTS.items()
        )
        return {"type": "string", "pattern": f"^(auto|{names})$"}
