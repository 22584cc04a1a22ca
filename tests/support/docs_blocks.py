"""The fenced blocks of the documentation, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "experiments/**/*.md")
    for path in sorted(REPOSITORY.glob(pattern))
]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (unchecked|not run): (.+?) -->\s*\Z")
_PROMPT = re.compile(r"^(?:[a-z]+)?\$ ")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``mark``: "unchecked" for what no test can check, "not run" for Python that
    needs what is not here; the page says why."""

    page: Path
    line: int
    language: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        """Returns ``docs/jobs.md:7``."""
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def commands(self) -> list[tuple[list[str], list[str]]]:
        """Returns each command in words, and the lines shown as its output."""
        found: list[tuple[str, list[str]]] = []
        going_on = False
        for line in self.text.splitlines():
            if going_on:
                found[-1] = (f"{found[-1][0].removesuffix(chr(92))} {line.strip()}", [])
            elif prompt := _PROMPT.match(line):
                found.append((line[prompt.end() :], []))
            elif found:
                found[-1][1].append(line.rstrip())
            going_on = line.endswith("\\")
        return [(one, said) for text, said in found for one in _split(text)]


def blocks(page: Path) -> Iterator[Block]:
    """Lists the blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        mark = _MARK.search(before)
        line = before.count("\n") + 1
        inside = re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)
        yield Block(page, line, found[2], inside, mark and mark[1])


def spans(page: Path) -> list[str]:
    """Returns the code within the prose of a page."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(found.split()) for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def _split(text: str) -> Iterator[list[str]]:
    """Splits a line into commands, without assignments before them and files behind them."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word == ">":
            next(words)
        elif set(word) <= set("();&|"):
            parts.append([])
        elif parts[-1] or not (re.match(r"[A-Z_]+=", word) or word == "sudo"):
            parts[-1].append(word)
    return filter(None, parts)
