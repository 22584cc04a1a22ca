"""The file of a table of tuned choices: its fields and their limits.

A table may come from elsewhere and every ring takes the names in it, so all values are checked
before any is used. Only reading and writing a table import this module, and with it pydantic.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from ringray import transport
from ringray.base.redaction import plain
from ringray.partition import NAMES
from ringray.traffic.walk import BACKWARDS
from ringray_kernels.backends import BACKENDS
from ringray_kernels.config import Blocks
from ringray_kernels.dtypes import DTYPES

FORMAT = 1
_LARGEST = 2**53  # of a number: beyond it JSON has no integers
_NEEDED = {"strategy": ("partition", "transport"), "kernel": ("blocks",)}


def _one_of(names: Collection[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"got {value!r:.80}, expected one of {', '.join(names)}")
        return value

    return AfterValidator(check)


def _transport(value: str) -> str:
    transport.parse(value)
    return value


def _blocks(value: Any) -> int | str | None:
    if isinstance(value, str):
        return str(Blocks.parse(value))
    if value is None or (type(value) is int and 16 <= value <= 65536):
        return value
    raise ValueError(f"got {value!r:.80}, expected null, a text or an integer from 16 to 65536")


_Text = Annotated[str, Field(max_length=500), AfterValidator(plain)]
_Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]
_Size = Annotated[int, Field(ge=1, le=2**31)]


class TableFields(BaseModel):
    """Values are taken as they are written, and only known ones."""

    model_config = ConfigDict(strict=True, extra="forbid")


class PlaceFields(TableFields):
    """The fields of ``table.Place``. Older tables have no ``device``."""

    hardware: _Text
    kernels: _Text
    torch: _Text | None
    triton: _Text | None
    device: Literal["cpu", "cuda"] = "cuda"


class BucketFields(TableFields):
    """The fields of ``table.Bucket``."""

    ring_size: _Size
    threads: Annotated[int, Field(ge=0, le=4096)]
    dtype: Annotated[str, _one_of(DTYPES)]
    tokens: _Size
    batch: _Size
    heads: _Size
    kv_heads: _Size
    head_dim: _Size
    mask: _Text
    backward: bool


class ChoiceFields(TableFields):
    """The fields of a choice; which of them it needs depends on its use."""

    partition: Annotated[str, _one_of(NAMES)] = ""
    transport: Annotated[_Text, AfterValidator(_transport)] = ""
    backward: Annotated[str, _one_of(BACKWARDS)] = ""
    backend: Annotated[str, _one_of(BACKENDS)] | None = None
    compared: Annotated[list[Annotated[str, _one_of(BACKENDS)]], Field(max_length=99)] = []
    blocks: Annotated[int | str | None, PlainValidator(_blocks)] = None
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None


class EntryFields(TableFields):
    """The fields of ``table.Entry``; others are ignored."""

    model_config = ConfigDict(extra="ignore")

    use: Literal["strategy", "kernel"]
    place: PlaceFields
    bucket: BucketFields
    choice: ChoiceFields
    metrics: dict[_Text, _Number] = {}
    sweep: _Text = ""
    when: _Number = 0.0

    @model_validator(mode="after")
    def _complete(self) -> EntryFields:
        for name in _NEEDED[self.use]:
            if name not in self.choice.model_fields_set:
                raise ValueError(f"choice of a {self.use} misses {name!r}")
        return self


class TableFile(TableFields):
    """A whole file; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    format: Literal[1]
    entries: Annotated[list[EntryFields], Field(max_length=100_000)]


_PARTS: dict[object, type[TableFields]] = {
    "place": PlaceFields,
    "bucket": BucketFields,
    "choice": ChoiceFields,
}


def entries(text: str | bytes) -> list[dict[str, Any]]:
    """Returns the entries in the text of a table, each with the fields of ``table.Entry``, place
    and bucket as mappings.

    Raises:
        ValueError: it is not a table of this format; the message has the first mistake.
    """
    try:
        read = TableFile.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(_said(error)) from None
    return [entry.model_dump(exclude_unset=True) for entry in read.entries]


def _said(error: ValidationError) -> str:
    """Writes the first mistake: entry, field, given, expected."""
    first = error.errors()[0]
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    message, got = first["msg"], f"got {first['input']!r:.80}, "
    match first["type"]:
        case "value_error":
            message, got = str(first["ctx"]["error"]), ""
        case "json_invalid" | "missing":
            got = ""
        case "extra_forbidden":
            valid = _PARTS[first["loc"][-2]].model_fields
            message, got = f"unknown field, expected some of {', '.join(valid)}", ""
        case _:
            message = message.replace("Input should be", "expected")
    return f"{where}: {got}{message}" if where else f"{got}{message}"
