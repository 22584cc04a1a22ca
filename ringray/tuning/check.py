"""What an entry of a table of tuned choices may hold. A table may be from anywhere, and what it
names is taken by every ring: each value is checked before any of it is used.

Imports neither torch nor ray.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ringray import transport
from ringray.base.redaction import plain
from ringray.partition import PARTITIONS
from ringray.traffic import walk
from ringray_kernels.backends import BACKENDS
from ringray_kernels.config import Blocks

if TYPE_CHECKING:
    from collections.abc import Callable

FORMAT = 1
_MOST = 100_000  # entries of one table
_LONGEST = 500  # characters of a text
_LARGEST = 2**53  # of a number: beyond it JSON has no integers


def entries(text: str) -> list[dict[str, Any]]:
    """The entries in the text of a table, each with the fields of ``tuned.Entry``, place and bucket
    as mappings.

    Raises:
        ValueError: it is no table of this format; says what is wrong.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"expected an object with format: {FORMAT}")
    found = data.get("entries")
    if not isinstance(found, list) or len(found) > _MOST:
        raise ValueError(f"entries: expected a list of at most {_MOST}")
    return [_entry(one) for one in found]


def _entry(data: Any) -> dict[str, Any]:
    given = _mapping("an entry", data)
    if given.get("use") not in ("strategy", "kernel"):
        raise ValueError(f"use: got {given.get('use')!r:.80}, expected strategy or kernel")
    choice = _mapping("choice", given.get("choice"))
    for name in _NEEDED[given["use"]]:
        if name not in choice:
            raise ValueError(f"choice of a {given['use']} misses {name!r}")
    return {
        "use": given["use"],
        "place": _fields("place", given.get("place"), _PLACE),
        "bucket": _fields("bucket", given.get("bucket"), _BUCKET),
        "choice": _fields("choice", choice, _CHOICE, needed=False),
        **_fields("entry", {name: given[name] for name in _REST if name in given}, _REST,
                  needed=False),
    }  # fmt: skip


def _mapping(what: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{what}: got {data!r:.80}, expected an object")
    return data


def _fields(
    what: str, data: Any, kinds: dict[str, Callable[[Any], Any]], *, needed: bool = True
) -> dict[str, Any]:
    given = _mapping(what, data)
    for name in given:
        if name not in kinds:
            raise ValueError(f"{what}: got {name!r:.80}, expected some of {', '.join(kinds)}")
    found = {}
    for name, read in kinds.items():
        if name in given:
            try:
                found[name] = read(given[name])
            except ValueError as error:
                raise ValueError(f"{what}.{name}: {error}") from None
        elif needed and name != "device":  # older tables do not say
            raise ValueError(f"{what} misses {name!r}")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"got {value!r:.80}, expected a text of at most {_LONGEST} characters")
    return plain(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"got {value!r:.80}, expected a number")
    if not abs(value) <= _LARGEST:  # NaN is not
        raise ValueError(f"got {value!r:.80}, expected a finite number")
    return float(value)


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"got {value!r:.80}, expected an integer from {low} to {high}")
        return value

    return read


def _one_of(*names: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        # 1 is True to `in`, and a list cannot be looked up in a dict.
        if not any(type(value) is type(name) and value == name for name in names):
            raise ValueError(f"got {value!r:.80}, expected one of {', '.join(map(str, names))}")
        return value

    return read


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _transport(value: Any) -> str:
    transport.parse(_text(value))
    return str(value)


def _blocks(value: Any) -> int | str | None:
    if isinstance(value, str):
        return str(Blocks.parse(_text(value)))
    rows: int | None = _or_none(_whole(16, 65536))(value)
    return rows


def _metrics(value: Any) -> dict[str, float]:
    given = _mapping("an object of numbers", value)
    return {_text(name): _number(one) for name, one in given.items()}


_REST: dict[str, Callable[[Any], Any]] = {"metrics": _metrics, "sweep": _text, "when": _number}
_PLACE: dict[str, Callable[[Any], Any]] = {
    "hardware": _text, "kernels": _text, "torch": _or_none(_text), "triton": _or_none(_text),
    "device": _one_of("cpu", "cuda"),
}  # fmt: skip
_SIZE = _whole(1, 2**31)
_BUCKET: dict[str, Callable[[Any], Any]] = {
    "ring_size": _SIZE, "threads": _whole(0, 4096),
    "dtype": _one_of("float32", "bfloat16", "float16"), "tokens": _SIZE, "batch": _SIZE,
    "heads": _SIZE, "kv_heads": _SIZE, "head_dim": _SIZE, "mask": _text,
    "backward": _one_of(True, False),
}  # fmt: skip
_CHOICE: dict[str, Callable[[Any], Any]] = {
    "partition": _one_of(*PARTITIONS), "transport": _transport,
    "backward": _one_of(*walk.BACKWARDS), "backend": _or_none(_one_of(*BACKENDS)),
    "blocks": _blocks, "threads": _or_none(_whole(1, 4096)),
}  # fmt: skip
_NEEDED = {"strategy": ("partition", "transport"), "kernel": ("blocks",)}
