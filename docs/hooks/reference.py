"""Reference pages: the fields of specs, the options of commands, and the public Python names.

Each is read from what the product itself uses: the JSON Schema and the models behind it, the table
of commands, signatures and docstrings.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

from pydantic.fields import FieldInfo

import ringray
from ringray.lab import cli
from ringray.lab.cli.options import Option
from ringray.lab.kinds import KINDS
from ringray.lab.specs import model
from ringray.lab.specs.fields import Fields, Kind

_SPECS = """\
Every field of a spec, from the model that checks it. `ringray schema` prints the same as a JSON
Schema for editors, and `ringray validate SPEC` names the line of each mistake. Where *or a list*
stands, a list measures each of its values."""
_COMMANDS = """\
Every command with its options, as they are declared; `ringray COMMAND --help` prints the same."""


def specs() -> str:
    """Writes every field of a spec: values, default, meaning."""
    parts = [
        "# Specs",
        _SPECS,
        "```yaml\nversion: 1\nname: smallest\nkind: latency\nproblem: {seq_len: 4k}\n```",
        _fields(model.Spec, ""),
    ]
    for name, info in model.Spec.model_fields.items():
        if section := _model(info.annotation):
            parts += [f"## {name}", _plain(section.__doc__), _fields(section, f"{name}.")]
    kinds = [f"`{name}`" for name in KINDS]
    return "\n\n".join([*parts, "## Kinds", f"Valid kinds: {', '.join(kinds)}."]) + "\n"


def _fields(section: type[Fields], path: str) -> str:
    lines = ["| field | values | default | |", "|---|---|---|---|"]
    for name, info in section.model_fields.items():
        if _model(info.annotation) is None:
            cells = _values(section, name, info), _default(info), _plain(info.description)
            lines.append(f"| `{path}{name}` | {' | '.join(cells)} |")
            for inner in filter(None, map(_model, get_args(info.annotation))):
                lines += _fields(inner, f"{path}{name}.").splitlines()[2:]
    return "\n".join(lines)


def _model(given: Any) -> type[Fields] | None:
    return given if isinstance(given, type) and issubclass(given, Fields) else None


def _values(section: type[Fields], name: str, info: FieldInfo) -> str:
    kinds = [one for one in info.metadata if isinstance(one, Kind)]
    if not kinds:  # a section, or a field of one, inside of a field
        schema = section.model_json_schema()["properties"][name]
        one = schema.get("anyOf", [schema])[0]
        of = one.get("items", one)
        bounds = f"{of['type']}s from {of['minimum']}" if "minimum" in of else ""
        texts = ("a list of " * ("items" in one) + bounds or "a name, or the fields below", "null")
        return ", or ".join(texts[: 1 + ("anyOf" in schema)])
    expected = kinds[0].expected
    text = expected.removesuffix(" or a list of them")
    return _plain(text.removeprefix("one of ")) + ", *or a list*" * (text != expected)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "*required*"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, Fields):
        value = next(iter(value.model_dump().values()))
    extra = info.json_schema_extra
    if isinstance(extra, dict) and "default" in extra:
        value = extra["default"]
    return f"`{json.dumps(value)}`".replace('"', "")


def commands() -> str:
    """Writes every command with its arguments and options."""
    parts = ["# Command line", _COMMANDS]
    for name, (place, summary) in cli.COMMANDS.items():
        module, _, function = place.partition(":")
        command = getattr(importlib.import_module(f"{cli.__name__}.{module}"), function)
        usage = _printed(name, "--help").partition("\n\n")[0].removeprefix("usage: ")
        parts += [f"## ringray {name}", f"{_plain(summary[0].upper() + summary[1:])}."]
        parts.append(f"```text\n{usage}\n```")
        if given := getattr(command, "options", ()):
            parts.append("\n".join(["| | | default |", "|---|---|---|", *map(_option, given)]))
    closing = _printed("--help").partition("\nexit codes:")
    parts += ["## Exit codes and environment", f"```text\nexit codes:{closing[2].rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _printed(*command: str) -> str:
    """Returns what ringray prints, in lines of one length."""
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(command)
    return out.getvalue()


def _option(option: Option) -> str:
    settings = option.settings
    names, metavar = ", ".join(option.names), settings.get("metavar")
    shown = " ".join(filter(None, (names, metavar))) if names.startswith("-") else metavar or names
    default = settings.get("default", "")
    if default in ("", None, []) or settings.get("action") == "store_true":
        default = "required" if settings.get("required") else ""
    choices = f" One of {', '.join(settings['choices'])}." if "choices" in settings else ""
    return f"| `{shown}` | {_plain(settings.get('help', ''))}{choices} | {_plain(str(default))} |"


def api() -> str:
    """Writes the signature and the docstring of each public name."""
    parts = [
        "# Python",
        "The public names of `ringray`, with their docstrings. Each is imported when it is used.",
    ]
    for name in ringray.__all__:
        parts += _name(f"ringray.{name}", getattr(ringray, name))
    lab = importlib.import_module("ringray.lab")
    for name in getattr(lab, "__all__", ()):
        parts += _name(f"ringray.lab.{name}", getattr(lab, name))
    return "\n\n".join(parts) + "\n"


def _name(path: str, found: Any) -> Iterator[str]:
    yield f"## {path}"
    yield from _described(path, found)
    if inspect.isclass(found):
        for name in vars(found):
            one = getattr(found, name)
            if not name.startswith("_") and inspect.isroutine(one) and one.__doc__:
                yield f"### {path.rpartition('.')[2]}.{name}"
                yield from _described(name, one)


def _described(name: str, found: Any) -> Iterator[str]:
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(found)))
    yield f"```python\n{name.rpartition('.')[2]}{_wrapped(signature)}\n```"
    yield _docstring(inspect.getdoc(found) or "")


def _wrapped(signature: str) -> str:
    """Puts each parameter of a long signature on a line of its own."""
    if len(signature) <= 80:
        return signature
    inside, arrow, result = signature[1:].rpartition(") -> ")
    if not arrow:
        inside, result = signature[1:-1], ""
    depth, parts = 0, [""]
    for character in inside:
        depth += (character in "[({") - (character in "])}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    lines = ",\n".join(f"    {part.strip()}" for part in parts)
    return f"(\n{lines},\n)" + (f" -> {result}" if result else "")


def _docstring(text: str) -> str:
    """Turns the form of the docstrings into Markdown: names in double back-ticks, code after two
    colons, sections with an entry for each name."""
    text = re.sub(r"::\n\n((?: .*\n|\n)+)", _code, f"{text}\n".replace("``", "`"))
    first, *sections = re.split(r"^(Args|Returns|Raises|Yields):\n", text, flags=re.MULTILINE)
    parts = [first]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        after = re.sub(r"\A(?:    .*\n|\n(?=    ))*", "", body)
        lines = textwrap.dedent(body.removesuffix(after))
        if title in ("Args", "Raises"):
            lines = re.sub(r"^(\S.*?): ", r"* `\1`: ", lines, flags=re.MULTILINE)
        parts.append(f"**{title}**\n\n{lines}\n{after}")
    return "\n".join(parts)


def _code(match: re.Match[str]) -> str:
    return f"\n```python\n{textwrap.dedent(match[1]).rstrip()}\n```\n\n"


def _plain(text: str | None) -> str:
    """Writes a text in a cell or in prose: one line, nothing read as Markdown."""
    line = re.sub(r"\s+", " ", (text or "").replace("``", "`")).strip()
    return re.sub(r"[|]" if "`" in line else r"[|*<_]", r"\\\g<0>", line)
