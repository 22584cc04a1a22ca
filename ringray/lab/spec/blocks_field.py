"""``strategy.blocks``: how a backend cuts its work, as a number or as a text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ringray.lab.spec.fields import Kind, Mismatch, Whole
from ringray_kernels.config import Blocks

_ROWS = Whole(16, 65536)
_EXAMPLES = ("forward=128x64/8/2,dkv=64x128/8/2", "atomic_dq")
_LONGEST = 500


@dataclass(frozen=True)
class BlocksKind(Kind):
    """Query rows per fused call, or what ``Blocks.parse`` reads, kept in its one way to say it."""

    @property
    def expected(self) -> str:
        return f"{_ROWS.expected} (aten), or blocks (triton) such as {_EXAMPLES[0]!r}"

    def read(self, value: object) -> int | str:
        if not isinstance(value, str) or re.fullmatch(r"[-+]?[0-9]+", value):
            try:
                return _ROWS.read(value)
            except Mismatch as mismatch:
                raise Mismatch(self.expected, hint=mismatch.hint) from None
        if len(value) > _LONGEST:
            raise Mismatch(self.expected, hint=f"{_LONGEST} characters are the most")
        try:
            return str(Blocks.parse(value))
        except ValueError as error:
            raise Mismatch(self.expected, hint=str(error)) from None

    def schema(self) -> dict[str, Any]:
        text = {
            "type": "string",
            "pattern": "^ *(forward|dq|dkv|atomic_dq)",
            "maxLength": _LONGEST,
            "examples": list(_EXAMPLES),
        }
        return {"anyOf": [_ROWS.schema(), text]}
