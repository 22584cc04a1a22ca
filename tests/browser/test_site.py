"""The documentation as a site: it builds without a warning, and a browser shows it offline."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import pages

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page, Request

pytest.importorskip("mkdocs", reason="pip install 'ringray[docs]'")
ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("index", "docs/concepts", "docs/choosing", "docs/reference/specs")
BROWSER = pages.program()
browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
pytestmark = pytest.mark.slow


def build(root: Path, to: Path) -> subprocess.CompletedProcess[str]:
    config = root / "docs" / "mkdocs.yml"
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", to],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site") / "site"
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """A server of the site."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Writes nothing."""

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def watched(address: str) -> Iterator[Page]:
    """A browser; what it complains of, and what it requests elsewhere, is an error."""
    pytest.importorskip("playwright", reason="pip install playwright")
    wrong: list[str] = []

    def said(message: ConsoleMessage) -> None:
        if message.type == "error":
            wrong.append(message.text)

    def asked(request: Request) -> None:
        if not request.url.startswith((address, "about:", "blob:")):
            wrong.append(request.url)

    with pages.opened() as opened:
        opened.on("console", said)
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("request", asked)
        yield opened
    assert wrong == []


@pytest.fixture
def page(address: str) -> Iterator[Page]:
    """A watched browser for the served site."""
    with watched(address) as opened:
        yield opened


def test_every_page_of_the_repository_is_there(site: Path) -> None:
    for source in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        name = source.relative_to(ROOT).with_suffix(".html")
        assert (site / ("index.html" if name.stem == "README" else name)).is_file(), name
    text = (site / "docs" / "choosing.html").read_text(encoding="utf-8")
    assert "<!-- generated" not in text
    assert text.count("<table>") == 4


def test_broken_links_fail(tmp_path: Path) -> None:
    for name in ("ringray", "kernels", "cluster", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for page in [*ROOT.glob("*.md"), ROOT / ".rayignore"]:
        shutil.copy(page, tmp_path)
    with (tmp_path / "docs" / "concepts.md").open("a", encoding="utf-8") as concepts:
        concepts.write("\n[x](records.md#no-such-heading) [y](no-such-page.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "'#no-such-heading'" in said
    assert "'no-such-page.md'" in said
    assert "Aborted with 2 warnings" in said  # without these it builds


@browser
def test_pages_are_shown_in_light_and_dark(page: Page, address: str) -> None:
    for name in SHOWN:
        grounds = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(f"{address}/{name}.html")
            assert page.locator("article h1").first.is_visible()
            assert page.evaluate(_WIDTH) <= 1280, f"{name} is wider than the window"
            grounds.append(page.evaluate(_GROUND))
        assert len(set(grounds)) == 2, name


_WIDTH = "document.documentElement.scrollWidth"
_GROUND = "getComputedStyle(document.body).backgroundColor"
_MOTION = "one => getComputedStyle(one).animationName"


@browser
def test_pictures_come_from_the_tables_and_move_only_if_wanted(page: Page, address: str) -> None:
    page.goto(f"{address}/docs/concepts.html")
    assert page.locator("svg.drawn").count() == 8
    held = page.locator("svg.drawn").first.locator("rect.rank0")
    assert held.count() == 4 * 32 / 4  # partitions x positions / ranks
    chunk = page.locator("svg.drawn circle.chunk").first
    assert chunk.evaluate(_MOTION) == "none"
    page.emulate_media(reduced_motion="no-preference")
    assert chunk.evaluate(_MOTION).startswith("hop-")


def search(page: Page, text: str, page_found: str) -> None:
    """Types into the site's search; fails if it does not find a page."""
    asked = page.locator(".md-search__input")
    asked.fill(text)
    asked.press("End")  # it listens to keys
    found = page.locator(f'.md-search-result__link[href*="{page_found}"]').first
    found.wait_for(state="attached")


@browser
def test_search_finds_a_field_of_specs(page: Page, address: str) -> None:
    page.goto(f"{address}/index.html")
    search(page, "global_tokens", "specs.html")


@browser
def test_pages_and_search_work_from_the_disk(site: Path) -> None:
    with watched("file:") as page:
        page.goto((site / "docs" / "concepts.html").as_uri())
        assert page.locator("svg.drawn").count() == 8
        search(page, "global_tokens", "specs.html")
        page.goto((site / "docs" / "concepts.html").as_uri())
        page.get_by_role("link", name="How ringray works").first.click()
        assert page.locator("article h1").first.inner_text().startswith("How ringray works")
