"""Kinds of fields that only attention has: blocks, transports, windows and packed documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from ringray.base.errors import UserError, reason_of
from ringray.base.redaction import UNPRINTABLE
from ringray.lab.specs.fields import Fields, Kind, Mismatch, check_name, unquoted, whole
from ringray.lab.specs.yaml_source import EXAMPLES, Source, Where, dumped
from ringray.lab.trial.lengths import COLUMNS, LIMITS, MOST_DOCUMENTS, checked, read
from ringray.transport import TRANSPORTS
from ringray_kernels.config import Blocks

_BLOCKS = "forward=128x64/8/2,dkv=64x128/8/2"
_LONGEST = 500  # characters of blocks
_LENGTH = whole(0, 2**31 - 1)
_FILE = rf"[^{UNPRINTABLE}\t\n]{{1,4096}}"
_MOST_ROWS = 8192  # of all tables of lengths that a spec names


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


def _mapping(
    model: type[BaseModel], expected: Callable[[Where], str]
) -> Callable[[object], object]:
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
        # Without the names of a union's members.
        place = tuple(part for part in errors[0]["loc"] if part in fields or isinstance(part, int))
        raise Mismatch(expected(place), place=place)

    return read


_Whole = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class Window(Fields):
    """Positions before and after itself that a query sees."""

    left: _Whole | None = None
    """Positions before it. null: all."""
    right: _Whole | None = None
    """Positions after it. null: all."""


def _window() -> Kind:
    """Returns the kind of null, a number of positions, or ``{left: ..., right: ...}``."""
    fields = _mapping(Window, lambda place: f"{_LENGTH.expected}, null")
    return Kind(
        Annotated[_LENGTH.type | Window | None, BeforeValidator(fields)],
        f"null (no window), {_LENGTH.expected}, or {{left: positions before, right: after}}",
    )


class Documents(Fields):
    """Packed documents of given lengths; together they fill the sequence."""

    lengths: Annotated[
        tuple[_Whole, ...], Field(min_length=1, max_length=MOST_DOCUMENTS, fail_fast=True)
    ]
    """Tokens of each document."""


class DrawnDocuments(Fields):
    """Packed documents whose lengths are drawn from a table; the last is cut at the end of the
    sequence."""

    lengths: (
        Annotated[str, Field(pattern=f"^{_FILE}$")]
        | Annotated[tuple[tuple[_Whole, _Whole, _Whole], ...], AfterValidator(checked)]
    )
    """CSV file with the columns shortest,longest,documents, or its rows. The row of a document is
    drawn by their number of documents, its tokens evenly from shortest to longest. A relative path
    begins at the folder of the spec, or at the working directory for a spec without a file; the
    tables of the examples (lengths/magi.csv) are everywhere."""
    seed: _Whole = 0
    """Seed of the draw: the same table, seed and seq_len give the same documents."""


Packed = int | Documents | DrawnDocuments | None


def _documents() -> Kind:
    """Returns the kind of null, a number, ``{lengths: [...]}``, or ``{lengths: FILE, seed: N}``."""
    count, seed = whole(1, MOST_DOCUMENTS), whole(0, 2**31 - 1)
    listed = f"a list of lengths in tokens, at most {MOST_DOCUMENTS}, or a CSV file of a table"
    table = f"a CSV file of a table, or its rows [{', '.join(COLUMNS)}] with {LIMITS}"
    of_lengths = _mapping(Documents, lambda place: listed if len(place) == 1 else _LENGTH.expected)
    of_table = _mapping(DrawnDocuments, lambda place: seed.expected if "seed" in place else table)

    def read(value: object) -> object:
        match value:
            case {"seed": _} | {"lengths": str() | [[*_], *_]}:
                return of_table(value)
        return of_lengths(value)

    return Kind(
        Annotated[count.type | Documents | DrawnDocuments | None, BeforeValidator(read)],
        f"null (one document), a number of documents ({count.expected}), "
        "{lengths: [tokens of each]} or {lengths: CSV file, seed: N}",
    )


def read_tables(source: Source) -> None:
    """Puts the rows of tables of lengths in place of the files that a spec names, so that its text
    says what is measured wherever it is read again."""
    documents: Any = source.data
    field: Where = ("problem", "documents")
    for name in field:
        documents = documents.get(name) if isinstance(documents, dict) else None
    several = isinstance(documents, list)
    rows = 0
    for index, item in enumerate(documents if several else [documents]):
        match item:
            case {"lengths": str(file)} if re.fullmatch(_FILE, file):
                place = (*field, index, "lengths") if several else (*field, "lengths")
            case _:
                continue
        path, example = Path(source.path).parent / file, EXAMPLES / file
        try:
            own = Path(file).parent != Path("lengths") or path.exists()
            item["lengths"] = [list(row) for row in read(path if own else example)]
            rows += len(item["lengths"])
            if rows > _MOST_ROWS:
                raise UserError(f"more than {_MOST_ROWS:,} rows in the tables of a spec")
        except (UserError, OSError) as error:
            source.mistakes.append(source.error(reason_of(error), place))
            return
    if rows:
        comment = takewhile(lambda line: line.startswith("#"), source.text.splitlines(True))
        source.text = "".join(comment) + dumped(source.data)


BLOCKS = _blocks()
TRANSPORT = _transport()
WINDOW = _window()
DOCUMENTS = _documents()
