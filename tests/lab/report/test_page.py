"""The page that reports share."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from ringray.lab.report import page


class _Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.heads: list[str] = []
        self.scopes: list[str | None] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "path", "line", "rect"):
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.heads.append(tag)
        if tag == "th":
            self.scopes.append(dict(attributes).get("scope"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def made() -> str:
    evil = "<b>&\x00</script>"
    rows = [[evil, page.Number("1.5", 1.5)], ["b", page.Number("–", None)]]
    table = page.PageTable("all", ["name", "ms"], rows, sorts=True)
    picture = page.Picture(evil, "<svg></svg>")
    inner = page.Section(evil, [table, page.Facts([("a", evil)]), picture])
    blocks = [page.Text(evil), page.Listing([evil]), page.Code(evil)]
    return page.render(evil, [page.Section("One", [*blocks, inner])], evil)


def test_its_tags_close_and_its_headings_descend() -> None:
    outline = _Outline()
    outline.feed(made())
    assert outline.open == []
    assert outline.heads == ["h1", "h2", "h3", "h4"]
    assert outline.scopes == ["col", "col", "row", "row"]


def test_texts_are_texts() -> None:
    text = made()
    body = text[text.index("<body>") :]
    assert "<b>" not in body
    assert "\x00" not in text
    assert body.count("</script>") == 1, "the page's own"


def test_nothing_is_asked_for_and_no_other_script_runs() -> None:
    text = made()
    assert not re.findall(
        r"(?:src|href)=[\"']?(?!#)\w", re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    )
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]
    assert policy.count("'sha256-") == 1
    assert "unsafe-eval" not in policy
