"""One YAML document with the place of each value, read from a file that may be hostile.

``read_text`` reads the text; ``Source`` turns it into plain data (dict, list, str, int, float,
bool, None) and keeps the line of each value, so that errors can name it and quote what was written.
A value that ``--set`` gives has the option in place of a line. PyYAML's safe composer does the
parsing. Tags, anchors and aliases are refused; size and depth are bounded.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ringray.base.errors import SpecError, UserError, nearest, reason_of

MAX_BYTES = 1 << 20
MAX_DEPTH = 20

Where = tuple[str | int, ...]
"""The place of a value: ``("problem", "heads", 1)`` is the second of ``problem.heads``."""

# The examples: in a wheel inside of the package, in a checkout beside it.
_PACKAGE = Path(__file__).resolve().parents[2]
EXAMPLES = next(
    (top / "experiments" for top in (_PACKAGE, _PACKAGE.parent) if (top / "experiments").is_dir()),
    _PACKAGE / "experiments",
)
_TOO_LARGE = "is larger than 1 MiB, the most that a spec may have"
_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,30})")
_CORE = "tag:yaml.org,2002:"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _example(name: str) -> Path | None:
    """Returns the installed file of an example, ``experiments/NAME.yaml``, if none is here."""
    path = Path(name)
    if path.parent != Path("experiments") or path.exists():
        return None
    example = EXAMPLES / path.name
    return example if example.is_file() else None


def read_text(path: str | Path) -> str:
    """Returns the text of the spec at ``path``, or of an example that ringray brings.

    Raises:
        SpecError: the file cannot be read, is too large or is not UTF-8.
    """
    name = os.fspath(path)
    try:
        # Path() would drop a leading ./ from messages.
        with open(_example(name) or name, "rb") as file:  # noqa: PTH123
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"no such file{_neighbour(Path(name))}", path=name) from None
    except IsADirectoryError:
        raise SpecError("is a directory, expected a YAML file", path=name) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SpecError(f"cannot be read: {reason_of(error)}", path=name) from None
    if len(data) > MAX_BYTES:
        raise SpecError(_TOO_LARGE, path=name)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"byte {data[error.start]:#04x}"
        message = f"{byte} is not UTF-8 text; save the file as UTF-8"
        raise SpecError(message, path=name, line=line) from None


def dumped(data: object) -> str:
    """Returns plain data as the text of a YAML document.

    Raises:
        SpecError: it holds anything else, or itself.
    """
    try:
        options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True}
        return yaml.dump(data, Dumper=_Dumper, default_flow_style=None, **options)
    except (yaml.YAMLError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise SpecError(f"is no plain data: {_short(why)}", path="<spec>") from None


class _Dumper(yaml.SafeDumper):
    """SafeDumper that writes a list as often as it occurs."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _neighbour(path: Path) -> str:
    folder = EXAMPLES if path.parent == Path("experiments") else path.parent
    try:
        specs = [p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    close = nearest(path.name, specs)
    return f"; did you mean {str(path.with_name(close))!r}?" if close else ""


class Mark(NamedTuple):
    """The position of a value and its text."""

    line: int | None  # 1-based, of the value, or of its key if the value is a mapping or a list
    key_line: int | None
    written: str  # as errors quote it: 'eight', "a list", ...
    scalar: bool
    option: str = ""  # the option that gives it, which has no lines


class _Loader(yaml.SafeLoader):
    """SafeLoader's composer; refuses what a spec never needs."""

    depth = 0

    def __init__(self, text: str, source: Source) -> None:
        super().__init__(text)
        self.source = source

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        refused = ""
        self.depth += 1
        if anchor is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            refused = f"'{sign}{anchor}': anchors and aliases are not allowed here"
        elif tag is not None:
            refused = f"tag {tag.replace(_CORE, '!!')[:60]!r}: tags are not allowed here"
        elif self.depth > MAX_DEPTH:
            refused = f"nested deeper than {MAX_DEPTH} levels"
        if refused:
            raise self.source.error(refused, line=event.start_mark.line + 1)
        node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[arg-type]
        self.depth -= 1
        return node


@dataclass
class Source:
    """One YAML document: ``data``, the ``marks`` of all values, and the keys given twice.

    Raises:
        SpecError: it is not YAML, not one document, or holds anchors, tags or too many levels.
    """

    text: str
    path: str
    marks: dict[Where, Mark] = field(default_factory=dict, compare=False, repr=False)
    mistakes: list[SpecError] = field(default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        node = self._compose(self.text)
        self.empty = node is None or (node.tag == f"{_CORE}null" and not node.value)
        self.data = None if node is None else self._value(node, (), node.start_mark.line + 1)

    def replace(self, assignment: str) -> None:
        """Sets a field as ``--set FIELD=VALUE`` does; ``text`` becomes that of the result.

        Raises:
            UserError: ``given`` has another form.
            SpecError: the value is not YAML.
        """
        option = f"--set {_short(assignment)}"
        field, sign, text = assignment.partition("=")
        *around, last = where = tuple(field.strip().split("."))
        if not sign or not all(where) or len(where) > MAX_DEPTH:
            raise UserError(f"{option}: expected FIELD=VALUE such as problem.seq_len=64k")
        try:
            value = Source(text, option)
        except SpecError as error:
            raise SpecError(error.message, path=option, field=field) from None
        if not isinstance(self.data, dict):  # of no spec, which its check says
            return
        outside = (place for place in self.marks if place[: len(where)] != where)
        self.marks = {place: self.marks[place] for place in outside}
        self.mistakes += [
            SpecError(mistake.message, path=option, field=field) for mistake in value.mistakes
        ]
        inside: dict[Any, Any] = self.data
        for depth, part in enumerate(around, 1):
            if not isinstance(inside.get(part), dict):
                inside[part] = {}
                self.marks[where[:depth]] = Mark(None, None, "a mapping", False, option)
            inside = inside[part]
        inside[last] = value.data
        for place, mark in ({(): Mark(None, None, "nothing", True)} | value.marks).items():
            self.marks[*where, *place] = mark._replace(line=None, key_line=None, option=option)
        self.text = dumped(self.data)

    def line_of(self, where: Where) -> int | None:
        """Returns the line of the key at ``where``; None if the file does not have it."""
        return self.marks[where].key_line if where in self.marks else None

    def written(self, where: Where) -> str:
        """Returns the value at ``where`` as errors quote it."""
        mark = self._nearest(where)
        return mark.written if mark and (where in self.marks or mark.scalar) else "nothing"

    def error(self, message: str, where: Where = (), line: int | None = None) -> SpecError:
        """Returns the error about ``where``, by default on the line of its value."""
        mark = self._nearest(where)
        line = mark.line if mark and line is None else line
        path = (mark and mark.option) or self.path
        # The field at or around it: errors name no elements of lists.
        names = [_short(str(part)) for part in takewhile(lambda part: isinstance(part, str), where)]
        return SpecError(message, path=path, line=line, field=".".join(names) or None)

    def _nearest(self, where: Where) -> Mark | None:
        """Returns the mark of ``where``, or of the innermost written value around it."""
        ways = (where[:end] for end in range(len(where), -1, -1))
        return next((self.marks[way] for way in ways if way in self.marks), None)

    def _compose(self, text: str) -> yaml.Node | None:
        if len(text.encode("utf-8", "replace")) > MAX_BYTES:
            raise self.error(_TOO_LARGE)
        loader = None
        try:
            loader = _Loader(text, self)
            return loader.get_single_node()
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            char = f"{error.character:#04x}" if isinstance(error.character, int) else "?"
            raise self.error(f"character {char} is not allowed in YAML", line=line) from None
        except yaml.MarkedYAMLError as error:
            raise self._invalid(error) from None
        except (ValueError, OverflowError):  # PyYAML passes on what int() and chr() raise
            message = "not valid YAML: a number in an escape or a directive is out of range"
            raise self.error(message, line=loader.line + 1 if loader else None) from None

    def _invalid(self, error: yaml.MarkedYAMLError) -> SpecError:
        message = " ".join(filter(None, (error.context, error.problem)))
        hint = "; indent with spaces, not tabs" if "'\\t'" in message else ""
        if "single document" in message:
            message, hint = "a second document starts here", "; a spec is one document"
        mark = error.problem_mark or error.context_mark
        return self.error(f"not valid YAML: {message}{hint}", line=mark.line + 1 if mark else None)

    def _value(self, node: yaml.Node, where: Where, key_line: int) -> object:
        value_line = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            self.marks[where] = Mark(key_line, key_line, "a mapping", False)
            return self._mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            written = "a list" if node.value else "an empty list"
            self.marks[where] = Mark(key_line, key_line, written, False)
            items = enumerate(node.value)
            return [self._value(n, (*where, i), n.start_mark.line + 1) for i, n in items]
        value = _scalar(node)
        self.marks[where] = Mark(value_line, key_line, _written(node, value), True)
        return value

    def _mapping(self, node: yaml.MappingNode, where: Where) -> dict[str, object]:
        data: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value.isprintable():
                message = "a key is not a plain name, expected a field"
                self.mistakes.append(self.error(message, where, line))
                continue
            place = (*where, key_node.value)
            if key_node.value in data:
                message = f"given twice, first on line {self.marks[place].key_line}; keep one"
                self.mistakes.append(self.error(message, place, line))
                continue
            data[key_node.value] = self._value(value_node, place, line)
        return data


def _scalar(node: yaml.Node) -> object:
    """Returns the plain value of a scalar. Numbers that YAML 1.1 reads in an unusual way stay text:
    ``010`` (octal), ``0x10``, ``1:30`` (base 60), dates."""
    text: str = node.value
    kind = node.tag.removeprefix(_CORE)
    if kind == "null":
        return None
    if kind == "bool":
        return yaml.SafeLoader.bool_values[text.lower()]
    if kind == "int" and _PLAIN_INT.fullmatch(text):
        return int(text.replace("_", ""))
    if kind == "float" and ":" not in text:
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _written(node: yaml.Node, value: object) -> str:
    text = _short(node.value)
    if value is None:
        return "nothing" if text in ("", "~") else "null"
    if isinstance(value, bool) and text.lower() not in ("true", "false"):
        return f"{text} (YAML reads it as {str(value).lower()})"
    return repr(text) if isinstance(value, str) else text
