"""Kinds of fields that only attention has: blocks, transports, windows and packed documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from ringray.lab.specs.fields import Fields, Kind, Mismatch, check_name, unquoted, whole
from ringray.lab.specs.yaml_source import Where
from ringray.transport import TRANSPORTS
from ringray_kernels.config import Blocks

_BLOCKS = "forward=128x64/8/2,dkv=64x128/8/2"
_LONGEST = 500  # characters of blocks
_LENGTH = whole(0, 2**31 - 1)
_MOST = 65_536  # documents of a sequence; the planner makes tables of them


def _blocks() -> Kind:
    """Returns the kind of query rows per fused call, or ``Blocks`` in their normal form."""
    rows = whole(16, 65536)
    text = Field(pattern="^ *(forward|dq|dkv)=", max_length=_LONGEST, examples=[_BLOCKS])

    def normal(value: object) -> object:
        if not isinstance(value, str):
            return value
        unquoted(value)
        if len(value) > _LONGEST:
            raise ValueError(f"{_LONGEST} characters are the most")
        return str(Blocks.parse(value))

    return Kind(
        Annotated[rows.type | Annotated[str, text], BeforeValidator(normal)],
        f"{rows.expected} (aten), or blocks (triton) such as {_BLOCKS!r}",
    )


def _transport() -> Kind:
    """Returns the kind of ``auto``, ``ring``, ``hybrid``, ``hybrid:2``, ..."""
    names = ("auto", *TRANSPORTS)
    numbered = [name for name, transport in TRANSPORTS.items() if transport.parameter]
    written = [f"{name}(:[1-9][0-9]{{0,4}})?" if name in numbered else name for name in names]

    def named(value: object) -> object:
        if isinstance(value, str):
            check_name(value.partition(":")[0], names)
        return value

    pattern = Field(pattern=f"^({'|'.join(written)})$")
    expected = ", ".join([*names, f"or {numbered[0]}:N", *(f"{name}:N" for name in numbered[1:])])
    return Kind(Annotated[str, pattern, BeforeValidator(named)], f"one of {expected}")


def _mapping(model: type[BaseModel], expected: Callable[[Where], str]) -> BeforeValidator:
    """Reads a mapping as ``model``. ``expected``: of the value at a place in it."""
    fields = model.model_fields
    names = f"field{'s' * (len(fields) > 1)} {' and '.join(map(repr, fields))}"

    def read(value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        try:
            return model.model_validate(value)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
        for detail in errors:
            if detail["type"] == "extra_forbidden":  # an unknown name explains the other errors
                raise Mismatch(f"only the {names} here", place=detail["loc"])
        raise Mismatch(expected(errors[0]["loc"]), place=errors[0]["loc"])

    return BeforeValidator(read)


class Window(Fields):
    """Positions before and after itself that a query sees."""

    left: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    """Positions before it. null: all."""
    right: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    """Positions after it. null: all."""


def _window() -> Kind:
    """Returns the kind of null, a number of positions, or ``{left: ..., right: ...}``."""
    length = _LENGTH
    fields = _mapping(Window, lambda place: f"{length.expected}, null")
    return Kind(
        Annotated[length.type | Window | None, fields],
        f"null (no window), {length.expected}, or {{left: positions before, right: after}}",
    )


class Documents(Fields):
    """Packed documents of given lengths; together they fill the sequence."""

    lengths: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0, lt=2**31)], ...],
        Field(min_length=1, max_length=_MOST, fail_fast=True),
    ]
    """Tokens of each document."""


def _documents() -> Kind:
    """Returns the kind of null, a number of documents, or ``{lengths: [...]}``."""
    count = whole(1, _MOST)
    listed = f"a list of lengths in tokens, at most {_MOST}"
    fields = _mapping(Documents, lambda place: listed if len(place) == 1 else _LENGTH.expected)
    return Kind(
        Annotated[count.type | Documents | None, fields],
        f"null (one document), a number of documents ({count.expected}), "
        "or {lengths: [tokens of each]}",
    )


BLOCKS = _blocks()
TRANSPORT = _transport()
WINDOW = _window()
DOCUMENTS = _documents()
