"""MLflow's pages of a sweep in headless Chromium, as a person who decides opens them.

Needs the package playwright and a Chromium, Chrome or Edge that is installed (Debian: ``apt-get
install chromium``); no browser is downloaded.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ringray.lab.tracking.location import MODE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

PROGRAMS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
)
PATIENCE_MS = 300_000
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


def program() -> str | None:
    """The path of a browser on this machine."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@contextmanager
def opened(width: int = 1280, height: int = 860) -> Iterator[Page]:
    """A page of a new browser that keeps nothing; what the page complains of is in ``errors``."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=program(),
            headless=True,
            args=list(_FLAGS),
            viewport={"width": width, "height": height},
            reduced_motion="reduce",
            color_scheme="light",
        )
        context.set_default_timeout(PATIENCE_MS)
        yield context.pages[0] if context.pages else context.new_page()
        context.close()


def noted(page: Page) -> list[str]:
    """What the page will request and complain of."""
    found: list[str] = []
    page.on("request", lambda request: found.append(request.url))
    page.on("console", lambda message: found.append(message.text))
    page.on("pageerror", lambda error: found.append(str(error)))
    return found


class Views:
    """The views of one sweep on the server at ``uri``."""

    def __init__(self, page: Page, uri: str, experiment_id: str, run_id: str) -> None:
        self.page, self._uri = page, uri
        self._runs = f"{uri}/#/experiments/{experiment_id}/runs"
        self._run_id, self._experiment_id = run_id, experiment_id
        self._tidied = False

    def parent(self) -> None:
        """The parent run: its summary and its figures."""
        self._go(f"{self._runs}/{self._run_id}?{MODE}")
        self.page.get_by_text("trials ended").first.wait_for()
        self.page.get_by_label("Expand description").click()
        self.page.wait_for_function(
            "() => { const all = [...document.querySelectorAll('img[src*=get-artifact]')];"
            " return all.length > 0 && all.every(one => one.complete && one.naturalWidth > 0) }"
        )

    def figure(self, name: str) -> None:
        """One figure among the parent run's artifacts."""
        self._go(f"{self._runs}/{self._run_id}/artifacts/figures/{name}.png?{MODE}")
        self.page.locator("img[src^=blob], img[src*=get-artifact], img[src^=data]").first.wait_for()
        self.page.wait_for_timeout(1000)  # the list of files beside it comes later

    def follow(self, text: str) -> None:
        """Clicks a link of the parent run's summary."""
        link = self.page.get_by_role("link", name=re.compile(f"^{text}")).first
        target = link.get_attribute("href")
        assert target
        self._go(target if "://" in target else f"{self._uri}/{target}")

    def charts_drawn(self) -> None:
        """Waits for the first charts of the page that is open."""
        self.page.locator(".js-plotly-plot .main-svg").first.wait_for()
        self.page.wait_for_timeout(1500)

    def compare_drawn(self) -> None:
        """Waits for the parallel coordinates of the compare page."""
        self.page.get_by_text(re.compile(r"Comparing \d+ Runs")).first.wait_for()
        self.page.locator(".parcoords").first.wait_for()
        self.page.wait_for_timeout(1000)

    def axes(self) -> list[str]:
        """The names of the axes of the parallel coordinates."""
        found: list[str] = self.page.locator(".parcoords .axis-title").all_text_contents()
        return found

    def _go(self, address: str) -> None:
        self.page.goto("about:blank")  # another fragment alone would not load the page anew
        self.page.goto(address)
        self.page.get_by_role("link", name="Settings").first.wait_for()
        if not self._tidied:  # MLflow keeps the choice
            self._tidied = True
            close = self.page.locator("[data-assistant-ui] button[aria-label=Close]")
            if close.count():
                close.first.click()
            self.page.goto("about:blank")
            self.page.goto(address)
