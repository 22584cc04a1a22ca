"""Kinds of fields: the values that one field of a spec may hold.

Pydantic checks each value strictly and writes the JSON Schema. Written here is what pydantic does
not have: the phrase that errors put after "expected", hints, units, and sweeps.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from ringray.base import units
from ringray.base.errors import suggestion

Ints = int | tuple[int, ...]
IntsOrNull = int | None | tuple[int | None, ...]
Names = str | tuple[str, ...]
NamesOrNull = str | None | tuple[str | None, ...]
FloatsOrNull = float | None | tuple[float | None, ...]

TOKENS = {"k": 1 << 10, "K": 1 << 10, "M": 1 << 20}
_TOKEN_UNITS = "64k or 1M (k is 1024, M is 1024k)"
_SIZES = {unit: units.BYTES[unit] for unit in ("MiB", "GiB", "TiB")}
_DECIMAL = r"[0-9]{1,9}(?:\.[0-9]{1,9})? ?"


class Fields(BaseModel):
    """Fields that do not change, and the texts under them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Mismatch(ValueError):
    """A value that a field cannot hold. ``place``: path to it inside the field's value."""

    def __init__(self, expected: str, *, place: tuple[str | int, ...] = (), hint: str = "") -> None:
        super().__init__(expected)
        self.expected, self.place, self.hint = expected, place, hint


class Kind:
    """Values that pydantic accepts as ``type``; ``expected`` describes them in errors.

    A validator in ``type`` may raise a ValueError with a hint, or a ``Mismatch``.
    """

    def __init__(self, type: Any, expected: str) -> None:
        self.type = type
        self.expected = expected

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.type, config=ConfigDict(strict=True))

    def read(self, value: object) -> Any:
        """Returns ``value`` in its normal form; raises Mismatch if it does not fit."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            cause = error.errors(include_url=False)[0].get("ctx", {}).get("error", "")
            if isinstance(cause, Mismatch):
                raise cause from None
            raise Mismatch(self.expected, hint=str(cause)) from None

    def argument(self, text: str) -> Any:
        """Reads an option of a command, as ``argparse`` calls it."""
        try:
            return self.read(int(text) if text.isdecimal() else text)
        except Mismatch as error:
            hint = error.hint and f"; {error.hint}"
            raise ArgumentTypeError(f"got {text!r}, expected {error}{hint}") from None

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(self._adapter.core_schema)


def whole(low: int, high: int) -> Kind:
    """Returns the kind of integers from ``low`` to ``high``."""
    integer = Annotated[int, Field(ge=low, le=high), BeforeValidator(unquoted)]
    return Kind(integer, f"an integer from {low} to {high}")


def unquoted(value: object) -> object:
    """Returns ``value``; raises ValueError for digits in quotes."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+", value):
        raise ValueError("write it plainly")
    return value


def one_of(
    names: Collection[str], aliases: Mapping[str, str] | None = None, also: str | None = None
) -> Kind:
    """Returns the kind of ``names``; ``aliases`` stand for names, and other texts are valid that
    have what the pattern ``also`` describes."""
    names, aliases = tuple(names), aliases or {}
    valid = (*names, *aliases)

    def resolve(value: object) -> object:
        if not isinstance(value, str) or (also and re.search(also, value)):
            return value
        return aliases.get(check_name(value, valid), value)

    schema: dict[str, Any] = {"type": "string", "enum": list(valid)}
    if also:
        schema = {"anyOf": [schema, {"type": "string", "pattern": also}]}
    enum = Annotated[str, WithJsonSchema(schema)]
    name = Annotated[str, BeforeValidator(resolve, json_schema_input_type=enum)]
    return Kind(name, f"one of {', '.join(names)}" if len(names) > 1 else names[0])


def check_name(name: str, names: Collection[str]) -> str:
    """Returns ``name``; raises ValueError, with the nearest of ``names``, if it is not in them."""
    if name not in names:
        raise ValueError(suggestion(name, names))
    return name


def text(pattern: str, expected: str, most: int | None = None) -> Kind:
    """Returns the kind of texts of ``most`` characters that match ``pattern`` as a whole."""

    def quoted(value: object) -> object:
        if isinstance(value, (bool, int, float)):
            raise ValueError("put it in quotes")
        return value

    constraints = Field(pattern=f"^{pattern}$", max_length=most)
    return Kind(Annotated[str, constraints, BeforeValidator(quoted)], expected)


def tokens(low: int, high: int) -> Kind:
    """Returns the kind of lengths in tokens, with or without a unit."""
    amount = _quantity(int, low, high, r"[1-9][0-9]{0,9}", TOKENS)
    expected = f"{whole(low, high).expected}, or {_TOKEN_UNITS}"
    return Kind(Annotated[amount, BeforeValidator(unquoted)], expected)


def duration(low: int, high: int) -> Kind:
    """Returns the kind of times from ``low`` to ``high`` seconds, read as seconds."""
    bounds = [f"{s // 3600}h" if s and s % 3600 == 0 else f"{s}s" for s in (low, high)]
    return Kind(
        _quantity(float, low, high, _DECIMAL, units.SECONDS),
        f"a duration from {' to '.join(bounds)}, such as 500ms, 90s, 2m, 1h or a number of seconds",
    )


def size(low: int, high: int) -> Kind:
    """Returns the kind of sizes of memory from ``low`` to ``high`` bytes, read as bytes."""
    return Kind(
        _quantity(int, low, high, _DECIMAL, _SIZES),
        f"a size from {low >> 20}MiB to {high >> 40}TiB, such as 512MiB, 2GiB or a number of bytes",
    )


def _quantity(
    number: Callable[[float], float], low: int, high: int, digits: str, table: Mapping[str, float]
) -> Any:
    """Returns the type of a ``number`` of base units, or a text of ``digits`` and a unit of
    ``table``.

    Ours, because pydantic's ``timedelta`` and ``ByteSize`` read other texts than these.
    """
    pattern = f"^({digits})({'|'.join(table)})$"

    def convert(value: object) -> object:
        match = re.fullmatch(pattern, value) if isinstance(value, str) else None
        return number(float(match[1]) * table[match[2]]) if match else value

    plain: Any = Annotated[number, Field(ge=low, le=high)]
    written = plain | Annotated[str, Field(pattern=pattern)]
    return Annotated[plain, BeforeValidator(convert, json_schema_input_type=written)]


TRUTH = Kind(bool, "true or false")
CAP = Kind(Annotated[float, Field(ge=0.001, le=1e6)], "a number from 0.001 to 1e6")
BASE = Kind(Annotated[float, Field(gt=1, le=1e12)], "a number above 1")
RATE = Kind(Annotated[float, Field(gt=0, lt=1)], "a number above 0, below 1")
# Of a rank and hour, as the text of an option.
PRICE = Kind(
    Annotated[float, Field(ge=1e-9, le=1e9, strict=False)], "a number above 0, from 1e-9 to 1e9"
)
SHARE = Kind(Annotated[float, Field(gt=0, le=1)], "a number above 0, at most 1")


def or_null(kind: Kind, meaning: str) -> Kind:
    """Returns ``kind`` with null, which stands for ``meaning``."""
    return Kind(kind.type | None, f"null ({meaning}) or {kind.expected}")


class Several(Kind):
    """One value of a kind, or a list of different ones. ``always``: read as a tuple in any case.

    Without ``always`` this is a sweep: a list where one value is meant measures each of them.
    Ours, because errors name the element that is wrong or given twice.
    """

    def __init__(self, item: Kind, *, always: bool = False) -> None:
        super().__init__(item.type, f"{item.expected} or a list of them")
        self.item, self.always = item, always

    def read(self, value: object) -> Any:
        if not isinstance(value, list | tuple):
            single = super().read(value)
            return (single,) if self.always else single
        if not value:
            raise Mismatch(self.expected)
        unique: dict[object, None] = {}
        for index, item in enumerate(value):
            try:
                choice = self.item.read(item)
            except Mismatch as mismatch:
                place = (index, *mismatch.place)
                raise Mismatch(mismatch.expected, place=place, hint=mismatch.hint) from None
            if choice in unique:
                raise Mismatch("each value once", place=(index,))
            unique[choice] = None
        # A list of one measures the same as its value, so both have one normal form.
        return tuple(unique) if self.always or len(unique) > 1 else next(iter(unique))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = super().__get_pydantic_json_schema__(core, handler)
        several = {"type": "array", "items": schema, "minItems": 1, "uniqueItems": True}
        return {"anyOf": [*schema.get("anyOf", [schema]), several]}
