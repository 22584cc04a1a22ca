"""Reading one YAML document from a file or a person who may be careless or hostile.

``read_text`` gets the text, ``Source`` turns it into plain data (dict, list, str, int, float,
bool, None) and remembers where each value stands, so that errors can name lines and quote what was
written. Built on PyYAML's safe composer: no tag, anchor or alias is followed, nothing is
constructed but plain data, and size and depth are bounded.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import yaml

from ringray.base.errors import SpecError, nearest

MAX_BYTES = 1 << 20
MAX_DEPTH = 20

Where = tuple[str | int, ...]
"""The place of a value: ``("problem", "heads", 1)`` is the second of ``problem.heads``."""

_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,30})")
_CORE = "tag:yaml.org,2002:"


def dotted(where: Where) -> str:
    """``problem.heads`` for any place in or under that list: errors name fields, not elements."""
    names = takewhile(lambda part: isinstance(part, str), where)
    return ".".join(_short(str(name)) for name in names)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_text(path: str | Path) -> str:
    """The text of the spec at ``path``; SpecError when there is none to be had."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:  # noqa: PTH123 - Path() drops a leading ./ from messages
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"no such file{_neighbour(Path(name))}", path=name) from None
    except IsADirectoryError:
        raise SpecError("is a directory, expected a YAML file", path=name) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError(f"cannot be read: {reason}", path=name) from None
    if len(data) > MAX_BYTES:
        raise SpecError("is larger than 1 MiB, the most that a spec may have", path=name)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(
            f"byte {data[error.start]:#04x} is not UTF-8 text; save the file as UTF-8",
            path=name,
            line=line,
        ) from None


def _neighbour(path: Path) -> str:
    try:
        specs = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    close = nearest(path.name, specs)
    return f"; did you mean {str(path.with_name(close))!r}?" if close else ""


@dataclass(frozen=True)
class Mark:
    """Where a value stands and how it was written."""

    line: int  # of the value itself, or of its key when the value spans lines; 1-based
    key_line: int
    written: str  # as errors quote it: 'eight', "a list", ...
    scalar: bool


class _Loader(yaml.SafeLoader):
    """SafeLoader's composer, with what a spec never needs refused while it reads."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            raise _Refused(
                f"'{sign}{event.anchor}': anchors and aliases are not allowed here", line
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            short = tag.replace(_CORE, "!!")
            raise _Refused(f"tag {short[:60]!r}: tags are not allowed here", line)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Refused(f"nested deeper than {MAX_DEPTH} levels", line)
        node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[arg-type]
        self.depth -= 1
        return node


class _Refused(Exception):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


class Source:
    """One YAML document: ``data``, where everything in it stands, and keys given twice.

    Raises:
        SpecError: it is not YAML, not one document, or holds anchors, tags or too many levels.
    """

    def __init__(self, text: str, path: str) -> None:
        self.text = text
        self.path = path
        self.marks: dict[Where, Mark] = {}
        self.mistakes: list[SpecError] = []
        node = self._compose(text)
        self.empty = node is None or (node.tag == f"{_CORE}null" and not node.value)
        self.data = None if node is None else self._value(node, (), node.start_mark.line + 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Source):
            return NotImplemented
        return (self.text, self.path) == (other.text, other.path)

    def __hash__(self) -> int:
        return hash((self.text, self.path))

    def line_of(self, where: Where) -> int | None:
        """The line on which the key of ``where`` stands; None if the file does not have it."""
        mark = self.marks.get(where)
        return mark.key_line if mark else None

    def nearest_mark(self, where: Where) -> Mark | None:
        """The mark of ``where``, or of the innermost thing around it that was written."""
        for end in range(len(where), -1, -1):
            if where[:end] in self.marks:
                return self.marks[where[:end]]
        return None

    def error(self, message: str, where: Where = (), line: int | None = None) -> SpecError:
        return SpecError(message, path=self.path, line=line, field=dotted(where) or None)

    def _compose(self, text: str) -> yaml.Node | None:
        if len(text.encode("utf-8", "replace")) > MAX_BYTES:
            raise self.error("is larger than 1 MiB, the most that a spec may have")
        loader = None
        try:
            loader = _Loader(text)
            return loader.get_single_node()
        except _Refused as refused:
            raise self.error(refused.message, line=refused.line) from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            char = f"{error.character:#04x}" if isinstance(error.character, int) else "?"
            raise self.error(f"character {char} is not allowed in YAML", line=line) from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            message = " ".join(filter(None, (error.context, error.problem)))
            hint = "; indent with spaces, not tabs" if "'\\t'" in message else ""
            if "single document" in message:
                message, hint = "a second document starts here", "; a spec is one document"
            line_of_mark = mark.line + 1 if mark else None
            raise self.error(f"not valid YAML: {message}{hint}", line=line_of_mark) from None
        except (ValueError, OverflowError):  # PyYAML passes on what int() and chr() raise
            message = "not valid YAML: a number in an escape or a directive is out of range"
            raise self.error(message, line=loader.line + 1 if loader else None) from None

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
                self.mistakes.append(
                    self.error("a key is not a plain name, expected a field", where, line)
                )
                continue
            place = (*where, key_node.value)
            if key_node.value in data:
                first = self.marks[place].key_line
                self.mistakes.append(
                    self.error(f"given twice, first on line {first}; keep one", place, line)
                )
                continue
            data[key_node.value] = self._value(value_node, place, line)
        return data


def _scalar(node: yaml.Node) -> object:
    """The plain value of a scalar. Numbers that mean something else to most people stay text:
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
