"""Specs that nobody would write: generated from the schema, and mutations of those that there are.

``make(seed, index)`` is a pure function of its arguments and of the files under ``experiments/``,
so that one number brings a case back. Half of the cases are meant to be nearly right: an error that
every case has hides all others.
"""

from __future__ import annotations

import copy
import json
import random
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from ringray.lab.specs.model import json_schema

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("ring", "problem", "strategy", "measure", "search", "limits", "tracking")

_JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 10**30, -(2**63), 0.5, 1e-9,
    1e308, float("inf"), float("nan"), "", " ", "64k", "1M", "0k", "9999999999M", "auto", "null",
    "no", "1:30", "0x10", "010", "1_000", "1e3", "ring", "hybrid:0", "hybrid:2",
    "double-ring:99999", "allgather:3", "forward=128x64/8/2", "forward=0x0/0/0",
    "dq=16x16/4/1,dq=16x16/4/1", "../../etc/passwd", "~/x", "a" * 300, "$(touch x)", "`id`",
    "'; DROP TABLE sweeps;--", "<script>alert(1)</script>", "[/b][bold]x", "%s%n", "{0.__class__}",
    "\x1b[2J", "\u202egnp.exe", "sqlite:////etc/passwd", "http://u:p@h/", "file:///etc",
    "!!python/object/apply:os.system [id]", [], {}, [[]], [None], {"lengths": []}, {"lengths": [1,
    63]}, {"lengths": [64]}, {"lengths": [0, 64, 0]}, {"lengths": [-1, 65]}, {"name": "sdpa",
    "threads": 1}, {"": ""}, {"__class__": "x"}, [1, 1], [1, [2]], ["ring", "ring"],
    "1" * 400, 10**400,
)  # fmt: skip
_WORDS = (
    ":", ": ", ",", "[", "]", "{", "}", "-", "- ", "\n", "\n  ", "\t", "#", "'", '"', "|", ">",
    "?", "&a ", "*a", "!!int ", "!x ", "<<: ", "---\n", "...\n", "%YAML 1.2\n", "~", "null",
    "true", "no", "0", "1", "-1", "64", "64k", "1M", "2147483647", "1e9", ".inf", ".nan", "0x1F",
    "1:30", "2001-01-01", "\\u0000", '"\\x1b[31m"', "\x00", "\x85", "\u2028", "\ufeff",
    "\U0001f600", "𝟜", "٣",
)  # fmt: skip
# Most problems are small: what is asked here is whether plans are right, not how long they take.
_LENGTHS = (1, 2, 5, 63, 64, 65, 100, 127, 512, 1000, "1k", "4k", 4096, "16k", 65536, "1M")

# What these kinds do not read and refuse, which would hide all other errors of most of their specs.
_TRAININGS = ("train", "max-context", "retrieval", "in-context-rl")
_UNREAD = {
    ("problem", "heads"), ("problem", "kv_heads"), ("problem", "head_dim"),
    ("measure", "warmup"), ("measure", "repeats"), ("measure", "baseline"),
}  # fmt: skip


@lru_cache(maxsize=1)
def corpus() -> tuple[str, ...]:
    """Every spec under ``experiments/``."""
    paths = sorted((ROOT / "experiments").glob("*.yaml"))
    return tuple(path.read_text(encoding="utf-8") for path in paths)


@lru_cache(maxsize=1)
def schema() -> dict[str, Any]:
    return json_schema()


def make(seed: int, index: int) -> tuple[str, bytes]:
    """Returns the method that made the case, and its bytes."""
    rng = random.Random(f"{seed}/{index}")
    ways = (
        (35, "schema", _from_schema), (30, "tree", _tree), (20, "tokens", _tokens), (15, "bytes",
        _bytes),
    )  # fmt: skip
    draw = rng.choices(ways, [weight for weight, _, _ in ways])[0]
    return draw[1], draw[2](rng)


def _dumped(rng: random.Random, data: Any) -> bytes:
    """As YAML in one of its styles, or as JSON, which is YAML too."""
    if rng.random() < 0.15:
        return json.dumps(data, default=str).encode("utf-8", "surrogatepass")
    style = rng.choice([None, True, False])
    text = yaml.safe_dump(data, default_flow_style=style, allow_unicode=rng.random() < 0.5)
    return str(text).encode("utf-8", "surrogatepass")


# From the schema


def _from_schema(rng: random.Random) -> bytes:
    """A spec of which each field is what the schema allows, or now and then is not."""
    return _dumped(rng, drawn(rng, wrong=rng.choice([0.0, 0.0, 0.03])))


def drawn(rng: random.Random, wrong: float = 0.0) -> dict[str, Any]:
    """A spec; ``wrong``: how often a value is junk."""
    kinds = schema()["properties"]["kind"]["enum"]
    data: dict[str, Any] = {"version": 1, "name": f"fuzz-{rng.randrange(10**6)}"}
    data["kind"] = rng.choice(kinds)
    unread = _UNREAD if data["kind"] in _TRAININGS and rng.random() < 0.9 else set()
    for section in SECTIONS:
        fields = schema()["$defs"][section.capitalize()]
        given = {}
        for name, kind in fields["properties"].items():
            if (section, name) in unread:
                continue
            if name in fields.get("required", ()) or rng.random() < 0.3:
                given[name] = _value(rng, section, name, kind)
                if rng.random() < wrong:
                    given[name] = rng.choice(_JUNK)
        if given or rng.random() < 0.2:
            data[section] = given
    if rng.random() < wrong:
        data[rng.choice([*data, "extra", "Problem"])] = rng.choice(_JUNK)
    return data


def _value(rng: random.Random, section: str, name: str, kind: dict[str, Any]) -> Any:
    if name == "seq_len":
        return _swept(rng, lambda: rng.choice(_LENGTHS))
    if section == "ring" and name == "size":
        return _swept(rng, lambda: rng.choice([1, 2, 3, 4, 4, 6, 8, 8, 16, 32]))
    if name in ("heads", "kv_heads"):
        return _swept(rng, lambda: rng.choice([1, 2, 4, 8, 8, 16, 12, 64]))
    if name == "replicas" and rng.random() < 0.98:  # many make a plan long, and no other
        return rng.choice([1, 1, 2, 3, 7])
    return of_schema(rng, kind)


def _swept(rng: random.Random, draw: Any) -> Any:
    if rng.random() < 0.7:
        return draw()
    return _distinct([draw() for _ in range(rng.randint(1, 3))])


def _distinct(values: list[Any]) -> list[Any]:
    return list({repr(value): value for value in values}.values())


def of_schema(rng: random.Random, kind: dict[str, Any]) -> Any:
    """A value that the JSON Schema ``kind`` allows, often at its edges."""
    if "$ref" in kind:
        return of_schema(rng, schema()["$defs"][kind["$ref"].rpartition("/")[2]])
    if "anyOf" in kind:
        return of_schema(rng, rng.choice(kind["anyOf"]))
    if "const" in kind:
        return kind["const"]
    if "enum" in kind:
        return rng.choice(kind["enum"])
    what = kind.get("type")
    if what == "integer":
        return _whole(rng, kind.get("minimum", 0), kind.get("maximum", 100))
    if what == "number":
        low, high = kind.get("minimum", kind.get("exclusiveMinimum", 0)), kind.get("maximum", 100)
        return rng.choice([low or 0.01, high, rng.uniform(low, high)])
    if what == "boolean":
        return rng.random() < 0.5
    if what == "null":
        return None
    if what == "array":
        most = 6 if kind["items"].get("minimum") == 0 else 3
        drawn = [of_schema(rng, kind["items"]) for _ in range(rng.randint(1, most))]
        return _distinct(drawn) if kind.get("uniqueItems") else drawn
    if what == "object":
        properties = kind.get("properties", {})
        needed = kind.get("required", ())
        return {
            name: of_schema(rng, one)
            for name, one in properties.items()
            if name in needed or rng.random() < 0.5
        }
    return _text(rng, kind.get("pattern", ""))


def _whole(rng: random.Random, low: int, high: int) -> int:
    near = [low, min(low + 1, high), min(high, low + rng.randrange(1, 17)), min(high, 64)]
    return rng.choice([*near, *near, min(high, 1 << rng.randrange(1, 32)), high])


def _text(rng: random.Random, pattern: str) -> str:
    examples = (
        "ring", "bidirectional", "allgather:2", "ulysses", "hybrid:2", "double-ring:4", "staged",
        "auto", "64k", "1M", "90s", "500ms", "2m", "forward=128x64/8/2",
        "dq=64x64/4/2,dkv=64x64/4/1", "a.b-c_d", "http://127.0.0.1:5000", "sqlite:///x.db",
        "postgresql://db/x", "experiment ü [x] <b>", "1h",
    )  # fmt: skip
    fitting = [text for text in examples if re.search(pattern, text) and text != "500ms"]
    return rng.choice(fitting or ["x"])


# From what there is


def _tree(rng: random.Random) -> bytes:
    """One to four changes to the data of a spec."""
    data = yaml.safe_load(rng.choice(corpus())) if rng.random() < 0.7 else drawn(rng)
    for _ in range(rng.randint(1, 4)):
        data = _changed(rng, data)
    return _dumped(rng, data)


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every container, and a key or index in it."""
    keys: list[Any] = []
    if isinstance(data, dict):
        keys = list(data)
    elif isinstance(data, list):
        keys = list(range(len(data)))
    return [(data, key) for key in keys] + [one for key in keys for one in _places(data[key])]


def _changed(rng: random.Random, data: Any) -> Any:
    places = _places(data)
    if not places:
        return rng.choice(_JUNK)
    inside, key = rng.choice(places)
    other, theirs = rng.choice(places)
    what = rng.randrange(9)
    if what == 0:
        del inside[key]
    elif what == 1:
        inside[key] = copy.deepcopy(rng.choice(_JUNK))
    elif what == 2:  # of the same field, as the schema has it
        section = rng.choice(SECTIONS)
        fields = schema()["$defs"][section.capitalize()]["properties"]
        name = rng.choice(list(fields))
        if isinstance(data, dict) and isinstance(data.setdefault(section, {}), dict):
            data[section][name] = _value(rng, section, name, fields[name])
    elif what == 3:
        inside[key], other[theirs] = copy.deepcopy(other[theirs]), copy.deepcopy(inside[key])
    elif what == 4:
        inside[key] = [copy.deepcopy(inside[key])]
    elif what == 5 and isinstance(inside, dict):
        name = rng.choice([f"{key}s", str(key).upper(), f" {key}", "size", "heads", "name"])
        inside[name] = inside[key]
    elif what == 6 and isinstance(inside[key], list):
        inside[key] = inside[key] + [copy.deepcopy(rng.choice([*_JUNK, *inside[key]]))]
    elif what == 7 and isinstance(inside[key], int):
        inside[key] = rng.choice(
            [inside[key] + 1, inside[key] - 1, -inside[key], inside[key] * 2, str(inside[key])]
        )
    else:
        inside[key] = {"x": copy.deepcopy(inside[key])}
    return data


def _tokens(rng: random.Random) -> bytes:
    """One to five changes to the words and signs of a spec."""
    tokens = re.findall(r"[\w.+-]+|\s+|[^\w\s]", rng.choice(corpus()))
    for _ in range(rng.randint(1, 5)):
        at, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        what = rng.randrange(5)
        if what == 0:
            tokens[at] = ""
        elif what == 1:
            tokens[at] = rng.choice(_WORDS)
        elif what == 2:
            tokens.insert(at, rng.choice(_WORDS))
        elif what == 3:
            tokens[at], tokens[other] = tokens[other], tokens[at]
        else:
            tokens[at] = tokens[other]
    return "".join(tokens).encode("utf-8", "surrogatepass")


def _bytes(rng: random.Random) -> bytes:
    """One to eight changes to the bytes of a spec, or two specs spliced."""
    data = bytearray(rng.choice(corpus()).encode())
    if rng.random() < 0.2:
        other = rng.choice(corpus()).encode()
        data = data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(5)
        if what == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            data.insert(
                at, rng.choice([rng.randrange(256), rng.choice(b"\n :-[]{},'\"#&*!0123456789")])
            )
        elif what == 2:
            del data[at : at + rng.randint(1, 12)]
        elif what == 3:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        elif rng.random() < 0.2:
            del data[at:]
    return bytes(data)
