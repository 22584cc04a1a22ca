"""Pages in headless Chromium, as a person who decides opens them.

Needs the package playwright and a Chromium, Chrome or Edge that is installed; no browser is
downloaded.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support import programs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import ConsoleMessage, Page

PATIENCE_MS = 300_000
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


@contextmanager
def opened(width: int = 1280, height: int = 860) -> Iterator[Page]:
    """A page of a new browser that keeps nothing."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=programs.browser(), headless=True, args=list(_FLAGS),
            viewport={"width": width, "height": height}, reduced_motion="reduce",
        )  # fmt: skip
        context.set_default_timeout(PATIENCE_MS)
        yield context.pages[0] if context.pages else context.new_page()
        context.close()


@contextmanager
def watched(address: str) -> Iterator[Page]:
    """A page that shows a file; its errors, and its requests elsewhere, fail the block."""
    wrong: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error":
            wrong.append(message.text)

    with opened() as page:
        page.on("console", note)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url))
        page.goto(address)
        yield page
    assert not [text for text in wrong if not text.startswith(("file:", "data:", "blob:"))]
