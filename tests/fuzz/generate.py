"""Specs that nobody would write: generated from the schema, and changes of those that there are.

``make(seed, index)`` is a pure function of its arguments and of the files under ``experiments/``,
so that one number brings a case back. Half of the cases are meant to be nearly right: an error that
every case has hides all others.
"""

from __future__ import annotations

import copy
import random
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from ringray.lab.specs.model import json_schema

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("ring", "problem", "strategy", "measure", "search", "limits", "tracking")
JUNK: tuple[Any, ...] = (
    None, True, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, 1e308, float("inf"), float("nan"), "",
    " ", "64k", "0k", "9999999999M", "auto", "1:30", "0x10", "1_000", "hybrid:0", "hybrid:2",
    "double-ring:99999", "forward=128x64/8/2", "forward=0x0/0/0", "../../etc/passwd", "a" * 300,
    "$(touch x)", "<script>alert(1)</script>", "[/b][bold]x", "{0.__class__}", "\x1b[2J",
    "\u202egnp.exe", "sqlite:////etc/passwd", "http://u:p@h/",
    "!!python/object/apply:os.system [id]", [], {}, [[]], [None], {"lengths": []},
    {"lengths": [1, 63]}, {"lengths": [-1, 65]}, {"name": "sdpa", "threads": 1}, {"": ""}, [1, 1],
    ["ring", "ring"], {"lengths": "lengths/magi.csv", "seed": 3}, {"lengths": [[1, 9, 2]]},
    {"lengths": "../../etc/passwd"},
)  # fmt: skip
# Most problems are small: what is asked here is whether plans are right, not how long they take.
SMALL = {
    "seq_len": (1, 2, 5, 63, 64, 65, 100, 512, 1000, "1k", 4096, "16k", 65536, "1M"),
    "size": (1, 2, 3, 4, 6, 8, 16, 32),
    "heads": (1, 2, 4, 8, 12, 16, 64),
    "kv_heads": (1, 2, 4, 8, 12, 16, 64),
    "replicas": (1, 2, 3, 7),
}
# What trainings do not read and refuse, which would hide all other errors of most of their specs.
TRAININGS = ("train", "max-context", "retrieval", "in-context-rl")
UNREAD = ("heads", "kv_heads", "head_dim", "warmup", "repeats", "baseline")
TEXTS = (
    "ring", "bidirectional", "direct", "allgather:2", "ulysses", "hybrid:2", "double-ring:4",
    "staged", "auto", "64k", "1M", "90s", "2m", "forward=128x64/8/2", "dq=64x64/4/2,dkv=64x64/4/1",
    "a.b-c_d", "http://127.0.0.1:5000", "sqlite:///x.db", "experiment ü [x] <b>",
    "lengths/magi.csv",
)  # fmt: skip


@lru_cache(maxsize=1)
def corpus() -> tuple[str, ...]:
    """Returns the text of every spec under ``experiments/``."""
    paths = sorted((ROOT / "experiments").glob("*.yaml"))
    return tuple(path.read_text(encoding="utf-8") for path in paths)


@lru_cache(maxsize=1)
def definitions() -> dict[str, Any]:
    schema = json_schema()
    return {**schema["$defs"], "": schema["properties"]}


def make(seed: int, index: int) -> bytes:
    """Returns the case, as YAML."""
    draw = random.Random(f"{seed}/{index}")
    how = draw.random()
    if how < 0.5:
        data = _spec(draw, wrong=draw.choice([0.0, 0.0, 0.03]))
    else:
        data = yaml.safe_load(draw.choice(corpus())) if draw.random() < 0.7 else _spec(draw)
        for _ in range(draw.randint(0, 2)):
            data = _changed(draw, data)
    text = yaml.safe_dump(data, default_flow_style=draw.choice([None, True, False]))
    return text.encode("utf-8", "surrogatepass")


def _spec(draw: random.Random, wrong: float = 0.0) -> dict[str, Any]:
    """Returns a spec of which each field is what the schema allows; ``wrong``: how often not."""
    kind = draw.choice(definitions()[""]["kind"]["enum"])
    data: dict[str, Any] = {"version": 1, "name": f"fuzz-{draw.randrange(10**6)}", "kind": kind}
    for section in SECTIONS:
        fields = definitions()[section.capitalize()]
        values = {}
        for name, form in fields["properties"].items():
            if kind in TRAININGS and name in UNREAD:
                continue
            if name in fields.get("required", ()) or draw.random() < 0.3:
                junk = draw.random() < wrong
                values[name] = draw.choice(JUNK) if junk else _value(draw, name, form)
        if values:
            data[section] = values
    return data


def _value(draw: random.Random, name: str, form: dict[str, Any]) -> Any:
    if name not in SMALL:
        return _of_schema(draw, form)
    if name == "replicas" or draw.random() < 0.7:
        return draw.choice(SMALL[name])
    return draw.sample(SMALL[name], draw.randint(1, 3))


def _of_schema(draw: random.Random, form: dict[str, Any]) -> Any:
    """Returns a value that a JSON Schema allows, often at its edges."""
    if "$ref" in form:
        return _of_schema(draw, definitions()[form["$ref"].rpartition("/")[2]])
    if "anyOf" in form:
        return _of_schema(draw, draw.choice(form["anyOf"]))
    if "const" in form:
        return form["const"]
    if "enum" in form:
        return draw.choice(form["enum"])
    low, high = form.get("minimum", form.get("exclusiveMinimum", 0)), form.get("maximum", 100)
    match form.get("type"):
        case "integer":
            return draw.choice([low, low + draw.randrange(17), min(64, high), high])
        case "number":
            return draw.choice([low or 0.01, high, draw.uniform(low, high)])
        case "boolean":
            return draw.random() < 0.5
        case "null":
            return None
        case "array" if "prefixItems" in form:
            return [_of_schema(draw, item) for item in form["prefixItems"]]
        case "array":
            values = [_of_schema(draw, form["items"]) for _ in range(draw.randint(1, 3))]
            return [value for place, value in enumerate(values) if value not in values[:place]]
        case "object":
            fields, required = form.get("properties", {}), form.get("required", ())
            return {
                name: _of_schema(draw, field)
                for name, field in fields.items()
                if name in required or draw.random() < 0.5
            }
    return draw.choice([text for text in TEXTS if re.search(form.get("pattern", ""), text)] or "x")


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Lists every container with each key or index in it."""
    keys = list(data) if isinstance(data, dict) else []
    if isinstance(data, list):
        keys = list(range(len(data)))
    return [(data, key) for key in keys] + [one for key in keys for one in _places(data[key])]


def _changed(draw: random.Random, data: Any) -> Any:
    """Returns data with a change in one place."""
    places = _places(data)
    if not places:
        return draw.choice(JUNK)
    inside, key = draw.choice(places)
    what = draw.randrange(4)
    if what == 0:
        del inside[key]
    elif what == 1:
        inside[key] = [copy.deepcopy(inside[key]), copy.deepcopy(draw.choice(JUNK))]
    elif what == 2 and isinstance(inside, dict):
        inside[draw.choice([f"{key}s", f" {key}", "size", "heads", "name"])] = inside[key]
    else:
        inside[key] = copy.deepcopy(draw.choice(JUNK))
    return data
