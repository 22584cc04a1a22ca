"""What can still be read of a damaged store: its rows, found page by page.

sqlite gives up a table when one page on the way to its rows is destroyed. This looks at every page
of the file and of its log by itself, as https://www.sqlite.org/fileformat2.html describes them: all
our tables are ``WITHOUT ROWID``, so that each entry of a page of theirs is a whole row. What looks
like a row by chance, or was changed, is told by its seal.
"""

from __future__ import annotations

import json
import re
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ringray.lab.store.schema import seal_of
from ringray.lab.trial.outcome import STATUSES, Kept, SweepInfo, TrialRow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PAGE = 4096  # where the header does not say
_LEAF, _INTERIOR = 0x0A, 0x02
_LOG_HEADER, _FRAME_HEADER = 32, 24
_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # bytes by serial type
_TRIAL, _SWEEP = 15, 9  # columns under the first schema; a seal came as the last later
_DIGEST = re.compile(r"[0-9a-f]{64}")

Row = list[Any]


@dataclass
class Salvaged:
    """What was read. ``unreadable``: by digest the keys of trials that had ended and are lost;
    ``leases``: pid, birth, host and beat of whoever held one."""

    sweeps: dict[str, tuple[SweepInfo, float]] = field(default_factory=dict)
    trials: dict[str, dict[str, Kept]] = field(default_factory=dict)
    unreadable: dict[str, set[str]] = field(default_factory=dict)
    leases: list[tuple[int, str, str, float]] = field(default_factory=list)


def salvage(path: Path) -> Salvaged:
    """Every whole row of the store at ``path`` and of the log beside it, the newest of each."""
    environments: dict[str, dict[str, Any]] = {}
    sweeps: list[Row] = []
    trials: list[Row] = []
    found = Salvaged()
    ended: dict[str, set[str]] = {}
    for row in _rows(*_pages(path)):
        match row:
            case [str(key), str(content)] if sha256(content.encode()).hexdigest() == key:
                environments[key] = json.loads(content)
            case [str(digest), int(seq), str(key)] if _DIGEST.fullmatch(digest):
                if seq:
                    ended.setdefault(digest, set()).add(key)
            case [str(_), "driver" | "tracker", str(_), int(pid), str(birth), str(host), beat]:
                found.leases.append((pid, birth, host, beat))
            case [str(digest), str(_), int(_), str(_), str(_), int(_), *_] if len(row) in (
                _TRIAL,
                _TRIAL + 1,
            ) and _DIGEST.fullmatch(digest):
                trials.append(row)
            case [str(digest), str(_), str(_), str(_), str(_), str(_), *_] if len(row) in (
                _SWEEP,
                _SWEEP + 2,
            ) and _DIGEST.fullmatch(digest):
                sweeps.append(row)
    for row in sweeps:
        _take_sweep(found, row, environments)
    for row in trials:
        _take_trial(found, row, environments)
    for digest, keys in ended.items():
        kept = found.trials.get(digest, {})
        lost = {key for key in keys if key not in kept or kept[key].trial.status is None}
        if lost:
            found.unreadable.setdefault(digest, set()).update(lost)
    for digest, kept in found.trials.items():
        found.unreadable.get(digest, set()).difference_update(
            key for key, one in kept.items() if one.trial.status is not None
        )
    return found


def _take_sweep(found: Salvaged, row: Row, environments: dict[str, dict[str, Any]]) -> None:
    digest, name, kind, spec, source, environment, _, created, updated = row[:_SWEEP]
    if len(row) > _SWEEP and row[-1] != seal_of(*row[:6]):
        return
    try:
        created, updated = float(created), float(updated)
        meaning = json.loads(spec)
    except (ValueError, TypeError):
        return
    if digest not in found.sweeps or updated >= found.sweeps[digest][1]:
        info = SweepInfo(digest, name, kind, meaning, source, environments.get(environment, {}))
        found.sweeps[digest] = info, created


def _take_trial(found: Salvaged, row: Row, environments: dict[str, dict[str, Any]]) -> None:
    digest, key, index, config, predicted, seq, status, *rest = row[:_TRIAL]
    reason, metrics, samples, point, attempts, started, ended, environment = rest
    try:
        # A page keeps a whole number as such, also where the column's are fractions.
        started, ended = (None if time is None else float(time) for time in (started, ended))
        content = (*row[: _TRIAL - 3], started, ended, environment)
        whole = len(row) == _TRIAL or row[-1] == seal_of(*content)
        if not whole or status not in (None, *STATUSES):
            raise ValueError(key)
        trial = TrialRow(
            key, index, json.loads(config), json.loads(predicted), status, reason,
            json.loads(metrics), json.loads(samples), point, attempts, started, ended,
            environments.get(environment),
        )  # fmt: skip
    except (ValueError, TypeError):
        found.unreadable.setdefault(digest, set()).add(key)
        return
    kept = found.trials.setdefault(digest, {})
    if key not in kept or seq >= kept[key].seq:
        kept[key] = Kept(trial, seq)


def _pages(path: Path) -> tuple[dict[int, bytes], list[bytes]]:
    """The pages by number as the last commit left them, and all that the log holds besides."""
    beside = path.with_name(f"{path.name}-wal")
    log = b""
    with suppress(FileNotFoundError):
        log = beside.read_bytes()
    data = path.read_bytes()
    size = struct.unpack(">H", data[16:18])[0] if len(data) > 18 else 0
    size = 65536 if size == 1 else size
    if size < 512 or size & (size - 1):
        size = _PAGE
    pages = {
        at // size + 1: data[at : at + size].ljust(size, b"\0") for at in range(0, len(data), size)
    }
    loose, waiting = [], {}
    good = struct.unpack(">I", log[:4])[0] | 1 == 0x377F0683 if len(log) > _LOG_HEADER else False
    for at in range(_LOG_HEADER, len(log) - _FRAME_HEADER - size + 1, _FRAME_HEADER + size):
        number, committed = struct.unpack(">II", log[at : at + 8])
        page = log[at + _FRAME_HEADER : at + _FRAME_HEADER + size]
        loose.append(page)
        good &= log[at + 8 : at + 16] == log[16:24]  # what an earlier log left behind
        if good:
            waiting[number] = page
            if committed:
                pages |= waiting
                waiting = {}
    return pages, loose


def _rows(pages: dict[int, bytes], loose: list[bytes]) -> Iterator[Row]:
    """The rows of all pages; those of the log's earlier pages first, so that later ones win."""
    for page in loose:
        yield from _rows_of(page, 0, pages)
    for number, page in pages.items():
        yield from _rows_of(page, 100 if number == 1 else 0, pages)


def _rows_of(page: bytes, at: int, pages: dict[int, bytes]) -> Iterator[Row]:
    kind = page[at]
    if kind not in (_LEAF, _INTERIOR):
        return
    (count,) = struct.unpack(">H", page[at + 3 : at + 5])
    pointers = at + (8 if kind == _LEAF else 12)
    for index in range(min(count, len(page) // 4)):
        try:
            (cell,) = struct.unpack_from(">H", page, pointers + 2 * index)
            yield _record(_payload(page, cell + (4 if kind == _INTERIOR else 0), pages))
        # Whatever a destroyed page pretends to be.
        except (ValueError, IndexError, KeyError, struct.error):
            continue


def _payload(page: bytes, at: int, pages: dict[int, bytes]) -> bytes:
    """A cell's content, which may go on in other pages."""
    length, at = _varint(page, at)
    usable = len(page)
    if length > usable * (len(pages) + 1):  # it may go round in circles
        raise ValueError("longer than the file")
    most = (usable - 12) * 64 // 255 - 23
    least = (usable - 12) * 32 // 255 - 23
    if length <= most:
        return page[at : at + length]
    spare = least + (length - least) % (usable - 4)
    local = spare if spare <= most else least
    content = bytearray(page[at : at + local])
    (following,) = struct.unpack_from(">I", page, at + local)
    while len(content) < length:
        beyond = pages[following]  # none is number 0
        (following,) = struct.unpack_from(">I", beyond)
        content += beyond[4 : 4 + length - len(content)]
    return bytes(content)


def _record(payload: bytes) -> Row:
    """The columns of a row."""
    end, at = _varint(payload, 0)
    types = []
    while at < end:
        serial, at = _varint(payload, at)
        types.append(serial)
    row: Row = []
    at = end
    for serial in types:
        value, at = _value(payload, at, serial)
        row.append(value)
    if at != len(payload):
        raise ValueError("no record")
    return row


def _value(payload: bytes, at: int, serial: int) -> tuple[Any, int]:
    if serial == 0:
        return None, at
    if serial in _INTEGERS:
        end = at + _INTEGERS[serial]
        return int.from_bytes(payload[at:end], "big", signed=True), end
    if serial == 7:
        return struct.unpack_from(">d", payload, at)[0], at + 8
    if serial in (8, 9):
        return serial - 8, at
    if serial < 13 or serial % 2 == 0:
        raise ValueError("we keep no blobs")
    end = at + (serial - 13) // 2
    return payload[at:end].decode(), end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of 1 to 9 bytes, and where it ends."""
    value = 0
    for index in range(8):
        byte = data[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + index + 1
    return value << 8 | data[at + 8], at + 9
