"""Pages in headless Chromium, as a person who decides opens them.

Needs the package playwright and a Chromium, Chrome or Edge that is installed; no browser is
downloaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ringray.lab.tracking.location import MODE
from tests.support import programs
from tests.support.place import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import ConsoleMessage, Page

PATIENCE_MS = 300_000
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


def site(folder: Path, *options: str, **variables: str) -> Path:
    """Builds the documentation."""
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", "docs/mkdocs.yml", "-d"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"} | variables
    subprocess.run([*command, folder, *options], cwd=REPOSITORY, env=environment, check=True)
    return folder


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


class Views:
    """MLflow's views of one sweep on the server at ``uri``."""

    def __init__(self, page: Page, uri: str, experiment_id: str, run_id: str) -> None:
        self.page, self._uri = page, uri
        self._run = f"{uri}/#/experiments/{experiment_id}/runs/{run_id}"

    def parent(self) -> None:
        """The parent run: its summary and its figures."""
        self._go(f"{self._run}?{MODE}")
        self.page.get_by_text("trials ended").first.wait_for()
        self.page.get_by_label("Expand description").click()
        self.page.wait_for_function(
            "() => { const all = [...document.querySelectorAll('img[src*=get-artifact]')];"
            " return all.length > 0 && all.every(one => one.complete && one.naturalWidth > 0) }"
        )

    def figure(self, name: str) -> None:
        """One figure among the parent run's artifacts."""
        self._go(f"{self._run}/artifacts/figures/{name}.png?{MODE}")
        self.page.locator("img[src^=blob], img[src*=get-artifact], img[src^=data]").first.wait_for()

    def follow(self, text: str) -> None:
        """Opens a link of the parent run's summary."""
        self.parent()
        link = self.page.get_by_role("link", name=re.compile(f"^{text}")).first
        target = link.get_attribute("href")
        assert target
        self._go(target if "://" in target else f"{self._uri}/{target}")

    def _go(self, address: str) -> None:
        self.page.goto("about:blank")  # another fragment alone would not load the page anew
        self.page.goto(address)
        self.page.get_by_role("link", name="Settings").first.wait_for()
        close = self.page.locator("[data-assistant-ui] button[aria-label=Close]")
        if close.count():
            close.first.click()
