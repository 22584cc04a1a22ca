"""One self-contained HTML page: readable without scripts, on light and dark paper, in print.

page.html   the layout (Jinja2; everything is escaped)
page.css    the style; colours are those of :mod:`ringray.lab.report.palette`
page.js     tables that filter and sort

``render(title, sections, about="")`` returns the page as text. ``sections`` are :class:`Section`:
a title and blocks, each a :class:`Text`, :class:`Listing`, :class:`Facts`, :class:`Code`,
:class:`PageTable`, :class:`Picture` or another :class:`Section`. Blocks hold plain text, which may
be hostile; only ``Picture.svg`` is markup, and comes from ``figures.style.picture(chart, name)``.
The page's policy lets no script run but its own and nothing be requested.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from ringray.base.redaction import plain
from ringray.lab.report.palette import PALETTE


class Text(NamedTuple):
    """A paragraph."""

    text: str
    tone: str = ""  # or "good", "bad", "pale"
    block: str = "text"


class Listing(NamedTuple):
    """A list of items."""

    items: Sequence[str]
    block: str = "list"


class Facts(NamedTuple):
    """Names with their values."""

    items: Sequence[tuple[str, str]]
    block: str = "facts"


class Code(NamedTuple):
    """Lines as they are typed."""

    text: str
    block: str = "code"


class Number(NamedTuple):
    """A cell of a table that is a number and sorts as one."""

    text: str
    value: float | None  # None sorts last
    tone: str = ""


class PageTable(NamedTuple):
    """A table; the first cell of a row is its heading. A number makes its column one of numbers."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str | Number]]
    sorts: bool = False  # by any column; with a filter
    block: str = "table"


class Picture(NamedTuple):
    """A figure."""

    title: str
    svg: str
    block: str = "picture"


class Section(NamedTuple):
    """A part of a page."""

    title: str
    blocks: Sequence[Any]
    block: str = "section"


def render(title: str, sections: Sequence[Section], about: str = "") -> str:
    """Returns the page; ``about`` is a line below the title."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        # Every text that is shown, wherever it came from, is without control characters.
        finalize=lambda value: plain(value) if type(value) is str else value,
    )
    script = _file("page.js")
    return environment.get_template("page.html").render(
        title=title,
        about=about,
        sections=sections,
        palette=PALETTE,
        style=_file("page.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        numbers=lambda table: [
            any(isinstance(row[column], Number) for row in table.rows)
            for column in range(len(table.heads))
        ],
    )


@cache
def _file(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
