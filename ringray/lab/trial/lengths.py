"""Tables of the lengths of documents, and the documents of a batch that are drawn from them.

A row of a table is the shortest and the longest length (tokens) of some documents, and their
number: the weight of the row.
"""

from __future__ import annotations

import csv
import random
from bisect import bisect
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from ringray.base.errors import UserError, reason_of

Table = tuple[tuple[int, int, int], ...]

COLUMNS = ("shortest", "longest", "documents")
LIMITS = "1 <= shortest <= longest < 2**31, 0 <= documents < 2**31"
MOST_DOCUMENTS = 65_536  # of a sequence; the planner makes tables of them
_MOST_BYTES = 1 << 17  # of a file, and the longest field that csv reads


def read(path: str | Path) -> Table:
    """Returns the table in a CSV file, whose first line is ``shortest,longest,documents``.

    Raises:
        UserError: the file cannot be read, is too large or holds no such table.
    """
    file = Path(path)
    try:
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "no such file"
            raise UserError(f"{path}: {what}, expected a CSV file")
        with file.open("rb") as opened:
            data = opened.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise UserError(f"{path}: is larger than {_MOST_BYTES >> 10} KiB, the most of a table")
        lines = csv.reader(data.decode("utf-8-sig").splitlines())
        header, *rows = list(lines) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error)}") from None
    if tuple(header) != COLUMNS:
        names = ",".join(header)[:60]
        raise UserError(f"{path}: got the first line {names!r}, expected {','.join(COLUMNS)}")
    try:
        return checked(row for row in rows if row)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def checked(rows: Iterable[Sequence[str | int]]) -> Table:
    """Returns rows as a table.

    Raises:
        ValueError: a row has another form, or none has documents.
    """
    table: list[tuple[int, int, int]] = []
    for number, row in enumerate(rows, 1):
        with suppress(ValueError):
            shortest, longest, documents = map(int, row)
            if 1 <= shortest <= longest < 2**31 and 0 <= documents < 2**31:
                table.append((shortest, longest, documents))
                continue
        got = repr(",".join(map(str, row))[:60])
        raise ValueError(f"row {number}: got {got}, expected {','.join(COLUMNS)} with {LIMITS}")
    if not any(documents for _, _, documents in table):
        raise ValueError("no row has documents, expected at least one")
    return tuple(table)


@lru_cache(maxsize=128)
def drawn(table: Table, tokens: int, seed: int) -> tuple[int, ...]:
    """Returns the lengths of documents that fill ``tokens``; the last is cut.

    A document's row is drawn by weight, its length uniformly from the row. The same arguments give
    the same documents on every machine and in every version of Python.

    Raises:
        UserError: they are more than ``MOST_DOCUMENTS``.
    """
    draw = random.Random(seed).random  # alone is promised to stay, unlike choices and randint
    weights = list(accumulate(documents for _, _, documents in table))
    lengths: list[int] = []
    rest = tokens
    while rest:
        if len(lengths) == MOST_DOCUMENTS:
            raise UserError(
                f"more than {MOST_DOCUMENTS:,} documents of this table fill {tokens:,} tokens; "
                "take fewer tokens or longer documents"
            )
        shortest, longest, _ = table[bisect(weights, draw() * weights[-1])]
        length = min(rest, shortest + int(draw() * (longest - shortest + 1)))
        lengths.append(length)
        rest -= length
    return tuple(lengths)
