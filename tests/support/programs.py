"""Programs that tests need beside Python's packages; the tests of a missing one are skipped."""

from __future__ import annotations

import shutil

BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge",
)  # fmt: skip
# Mark -> its programs, and Debian's package with them.
NEEDED = {
    "browser": (BROWSERS, "chromium"),
    "prometheus": (("prometheus", "promtool"), "prometheus"),
    "tc": (("tc", "ip"), "iproute2"),
}


def browser() -> str | None:
    """Returns the path of a browser on this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def missing(mark: str) -> str | None:
    """Returns why tests with ``mark`` cannot run here, None where they can."""
    programs, package = NEEDED[mark]
    enough = any if mark == "browser" else all
    if enough(map(shutil.which, programs)):
        return None
    return f"no {mark}: apt-get install {package}"
