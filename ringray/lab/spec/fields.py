"""What one field of a spec may hold: read it, say what is expected, describe it to editors.

Each ``Kind`` stands in an ``Annotated`` type of a pydantic model and does three things from one
declaration: ``read`` turns what YAML gave into the normal form, ``expected`` is the phrase that
errors use, ``schema`` is its JSON Schema. A value of the wrong kind raises ``Mismatch``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ringray.base.errors import suggestion


class Mismatch(ValueError):
    """A value that a field cannot hold. ``at``: the way to it inside the field's value."""

    def __init__(self, expected: str, *, at: tuple[str | int, ...] = (), hint: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.at = at
        self.hint = hint


class Kind(ABC):
    """One kind of value."""

    @property
    @abstractmethod
    def expected(self) -> str:
        """What fits, as errors say it after "expected"."""

    @abstractmethod
    def read(self, value: object) -> Any:
        """``value`` in its normal form; Mismatch if it does not fit."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of what ``read`` takes."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return self.schema()


@dataclass(frozen=True)
class Whole(Kind):
    """An integer from ``low`` to ``high``; with ``suffixes`` also 64k and 1M, times 1024."""

    low: int
    high: int
    suffixes: bool = False

    @property
    def expected(self) -> str:
        if self.low == self.high:
            return str(self.low)
        plain = f"an integer from {self.low} to {self.high}"
        return f"{plain}, or 64k or 1M (k is 1024, M is 1024k)" if self.suffixes else plain

    def read(self, value: object) -> int:
        if self.suffixes and isinstance(value, str):
            match = re.fullmatch(r"([1-9][0-9]{0,9})([kKM])", value)
            if match:
                value = int(match[1]) << (20 if match[2] == "M" else 10)
        if type(value) is not int:  # bool is an int to isinstance
            quoted = isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+", value)
            raise Mismatch(self.expected, hint="write it plainly" if quoted else "")
        if not self.low <= value <= self.high:
            raise Mismatch(self.expected)
        return value

    def schema(self) -> dict[str, Any]:
        number = {"type": "integer", "minimum": self.low, "maximum": self.high}
        if not self.suffixes:
            return number
        return {"anyOf": [number, {"type": "string", "pattern": "^[1-9][0-9]{0,9}[kKM]$"}]}


@dataclass(frozen=True)
class Choice(Kind):
    """One of some names. ``names`` is called when it is needed, so registries load late."""

    names: Callable[[], Iterable[str]]
    aliases: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, *names: str, aliases: Mapping[str, str] | None = None) -> Choice:
        return cls(lambda: names, aliases or {})

    @property
    def expected(self) -> str:
        names = list(self.names())
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]

    def read(self, value: object) -> str:
        names = list(self.names())
        if not isinstance(value, str):
            raise Mismatch(self.expected)
        value = self.aliases.get(value, value)
        if value not in names:
            raise Mismatch(self.expected, hint=suggestion(value, [*names, *self.aliases]))
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": [*self.names(), *self.aliases]}


@dataclass(frozen=True)
class Truth(Kind):
    @property
    def expected(self) -> str:
        return "true or false"

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise Mismatch(self.expected)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Share(Kind):
    """A part of something: more than nothing, at most all of it."""

    @property
    def expected(self) -> str:
        return "a number above 0, at most 1"

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise Mismatch(self.expected)
        return float(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "exclusiveMinimum": 0, "maximum": 1}


@dataclass(frozen=True)
class Text(Kind):
    """A text that matches ``pattern`` as a whole. ``what`` says so in words."""

    pattern: str
    what: str

    @property
    def expected(self) -> str:
        return self.what

    def read(self, value: object) -> str:
        if isinstance(value, (bool, int, float)):
            raise Mismatch(self.expected, hint="put it in quotes")
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value):
            raise Mismatch(self.expected)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{self.pattern}$"}


@dataclass(frozen=True)
class OrNull(Kind):
    """``kind`` or nothing; ``meaning`` says what null stands for."""

    kind: Kind
    meaning: str

    @property
    def expected(self) -> str:
        return f"null ({self.meaning}) or {self.kind.expected}"

    def read(self, value: object) -> object:
        if value is None:
            return None
        try:
            return self.kind.read(value)
        except Mismatch as mismatch:
            expected = mismatch.expected if mismatch.at else self.expected
            raise Mismatch(expected, at=mismatch.at, hint=mismatch.hint) from None

    def schema(self) -> dict[str, Any]:
        own = self.kind.schema()
        return {"anyOf": [*own.get("anyOf", [own]), {"type": "null"}]}


@dataclass(frozen=True)
class Several(Kind):
    """One of ``kind``, or a list of them. ``always``: the normal form is a tuple in any case.

    Without ``always`` this is a sweep: a list where one value is meant measures each of them.
    """

    kind: Kind
    always: bool = False
    distinct: bool = True

    @property
    def expected(self) -> str:
        return f"{self.kind.expected} or a list of them"

    def read(self, value: object) -> Any:
        if not isinstance(value, list | tuple):
            try:
                single = self.kind.read(value)
            except Mismatch as mismatch:
                expected = mismatch.expected if mismatch.at else self.expected
                raise Mismatch(expected, at=mismatch.at, hint=mismatch.hint) from None
            return (single,) if self.always else single
        if not value:
            raise Mismatch(self.expected)
        items: list[object] = []
        seen: set[object] = set()
        for index, item in enumerate(value):
            try:
                one = self.kind.read(item)
            except Mismatch as mismatch:
                at = (index, *mismatch.at)
                raise Mismatch(mismatch.expected, at=at, hint=mismatch.hint) from None
            items.append(one)
            if self.distinct and one in seen:
                raise Mismatch("each value once", at=(index,))
            seen.add(one)
        # A list of one measures the same as its value, so both have one normal form.
        return tuple(items) if self.always or len(items) > 1 else items[0]

    def schema(self) -> dict[str, Any]:
        one = self.kind.schema()
        several = {"type": "array", "items": one, "minItems": 1, "uniqueItems": self.distinct}
        return {"anyOf": [*one.get("anyOf", [one]), several]}


def sweep(kind: Kind) -> Several:
    """A field that may be swept: one value of ``kind``, or a list of different ones."""
    return Several(kind)


class Documents(BaseModel):
    """Packed documents of given lengths, in tokens; together they fill the sequence."""

    model_config = ConfigDict(frozen=True)

    lengths: tuple[int, ...]


_MOST = 65_536  # documents of a sequence: the planner makes tables of them
_COUNT = Whole(1, _MOST)
_LENGTHS = Several(Whole(0, 2**31 - 1), always=True, distinct=False)


@dataclass(frozen=True)
class DocumentsKind(Kind):
    """null, a number of documents, or ``{lengths: [...]}``."""

    @property
    def expected(self) -> str:
        return (
            f"null (one document), a number of documents ({_COUNT.expected}), "
            "or {lengths: [tokens of each]}"
        )

    def read(self, value: object) -> int | Documents | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            try:
                return _COUNT.read(value)
            except Mismatch as mismatch:
                raise Mismatch(self.expected, hint=mismatch.hint) from None
        for key in value:
            if key != "lengths":
                raise Mismatch("only the field 'lengths' here", at=(key,))
        lengths = value.get("lengths")
        if not isinstance(lengths, list | tuple) or len(lengths) > _MOST:
            raise Mismatch(f"a list of lengths in tokens, at most {_MOST}", at=("lengths",))
        try:
            return Documents(lengths=_LENGTHS.read(value["lengths"]))
        except Mismatch as mismatch:
            raise Mismatch(_LENGTHS.kind.expected, at=("lengths", *mismatch.at)) from None

    def schema(self) -> dict[str, Any]:
        lengths = {
            "type": "object",
            "properties": {"lengths": {**_LENGTHS.schema()["anyOf"][-1], "maxItems": _MOST}},
            "required": ["lengths"],
            "additionalProperties": False,
        }
        return {"anyOf": [_COUNT.schema(), lengths, {"type": "null"}]}


@dataclass(frozen=True)
class Short:
    """A section that may be given as the value of its field ``key`` alone."""

    key: str
    kind: Kind

    def _expand(self, value: object) -> object:
        return {self.key: value} if isinstance(value, str) else value

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._expand, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [*handler(core)["anyOf"], self.kind.schema()]}
