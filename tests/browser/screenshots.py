"""``make screenshots``: the pictures of the README and the docs, from real sweeps.

Measures small sweeps on this machine, tracks them on an MLflow server of its own, and has MLflow's
pages, a report, a comparison and pages of the site drawn by a Chromium that is installed; the
picture of ``ringray watch`` is what it writes on a terminal. Takes three minutes.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringray.lab.store.store import Store
from tests.browser import pages
from tests.support import tracking_store
from tests.support.tracking_servers import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = """\
version: 1
name: which-strategy
kind: latency
ring:     {size: 2, device: cpu, threads: 1}
problem:  {seq_len: [512, 1k, 2k, 4k], heads: 4, head_dim: 64, dtype: float32,
           direction: forward+backward}
strategy: {partition: [contiguous, zigzag], transport: [ring, allgather, ulysses]}
measure:  {warmup: 1, repeats: 5, baseline: {name: sdpa, threads: 2}}
"""
BLOCKS = """\
version: 1
name: which-blocks
kind: latency
ring:     {size: 2, device: cpu, threads: [1, 2]}
problem:  {seq_len: 2k, heads: 4, head_dim: 64, dtype: float32,
           direction: [forward, forward+backward]}
strategy: {partition: zigzag, backend: aten, blocks: [null, 64, 128, 256, 512]}
measure:  {warmup: 1, repeats: 5, baseline: null}
"""


SITE = ("ten-minutes", "concepts", "choosing")
WIDTH = 110  # columns of the terminal


def start(home: Path, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    """``ringray ARGUMENTS`` with a home of its own."""
    environment = os.environ | {
        "RINGRAY_HOME": str(home),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    }
    command = [sys.executable, "-m", "ringray", *arguments]
    return subprocess.Popen(command, cwd=home, env=environment, **more)


def ringray(home: Path, *arguments: str) -> None:
    """Runs ``ringray ARGUMENTS`` to its end."""
    with start(home, *arguments) as process:
        assert process.wait() == 0, arguments


def sweep(text: str, home: Path) -> str:
    """Writes a spec; returns its name."""
    name = text.split("name: ")[1].split()[0]
    (home / f"{name}.yaml").write_text(text)
    return name


def tracked(uri: str, name: str) -> dict[str, Any]:
    """Where MLflow has a sweep."""
    (parent,), _ = tracking_store.runs(uri, name)
    return {"experiment": parent.info.experiment_id, "run": parent.info.run_id}


def watched(home: Path, name: str, ended: int, to: Path) -> None:
    """A picture of what ``ringray watch`` shows once ``ended`` trials have ended."""
    from rich.console import Console
    from rich.text import Text

    def count() -> int:
        with Store(home / "store.db") as store:
            return sum(store.find(name).counts.values()) if store.sweeps() else 0

    while count() < ended:
        time.sleep(0.1)
    terminal, inside = pty.openpty()
    termios.tcsetwinsize(inside, (40, WIDTH))
    with start(home, "watch", name, stdin=inside, stdout=inside, stderr=inside) as watcher:
        seen, until = b"", time.monotonic() + 6
        while time.monotonic() < until:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 1 << 16)
        watcher.terminate()
    # Each frame begins by moving up over the one before.
    frames = re.split(r"(?:\x1b\[1?A\x1b\[2K)+", seen.decode())[1:-1]
    frame = [one for one in frames if one.count("▶") == 1][-1]
    screen = Console(record=True, width=WIDTH, file=io.StringIO())
    screen.print(Text.from_ansi(frame.replace("\r", "").strip("\n")))
    screen.save_svg(str(to), title=f"ringray watch {name}")


def save(page: Page, path: Path, clip: dict[str, float] | None = None) -> None:
    """A picture of the page with 128 colours, which is a third of its size."""
    from PIL import Image

    png = page.screenshot(clip=clip)  # type: ignore[arg-type]
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(128)
    picture.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size >> 10} KiB")


def report(home: Path, name: str, folder: Path) -> None:
    """Pictures of a sweep's report at two widths, and of the comparison of two others."""
    ringray(home, "report", name, "-o", "report.html")
    for store in ("before.db", "after.db") * 4:  # in turns
        spec = str(ROOT / "experiments" / "compare.yaml")
        ringray(home, "run", spec, "--store", store, "--again")
    ringray(home, "compare", "before.db", "after.db", "--html", "compare.html")
    for file, picture, width, height in (
        ("report", "report", 1280, 1500),
        ("report", "report-narrow", 400, 1500),
        ("compare", "compare", 1040, 900),
    ):
        with pages.opened(width, height) as page:
            page.goto((home / f"{file}.html").as_uri())
            save(page, folder / f"{picture}.png")


def site(home: Path, folder: Path) -> None:
    """Pictures of pages of the documentation."""
    config, to = ROOT / "docs" / "mkdocs.yml", home / "site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "-f", str(config), "-d", str(to)],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True,
    )  # fmt: skip
    for name in SITE:
        with pages.opened(1280, 800) as page:
            page.goto((to / "docs" / f"{name}.html").as_uri())
            page.wait_for_timeout(1000)
            save(page, folder / f"site-{name}.png")


def main() -> int:
    """Writes the pictures into the folder that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "images")
    folder = parser.parse_args().folder
    if pages.program() is None:
        print("no Chromium on this machine (Debian: apt-get install chromium)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ringray-shots-") as name:
        home = Path(name)
        server = Server(home, f"sqlite:///{home}/server.db")
        server.start()
        try:
            os.environ["MLFLOW_TRACKING_URI"] = server.uri
            names = [sweep(text, home) for text in (STRATEGIES, BLOCKS)]
            with start(home, "run", f"{names[0]}.yaml") as first:
                watched(home, names[0], 14, folder / "watch.svg")
                assert first.wait() == 0
            ringray(home, "run", f"{names[1]}.yaml")
            one, other = (tracked(server.uri, name) for name in names)
            with pages.opened(1440, 900) as page:
                views = pages.Views(page, server.uri, one["experiment"], one["run"])
                views.parent()
                save(page, folder / "mlflow-parent.png")
                views.figure("pareto")
                save(page, folder / "mlflow-figures.png")
                views.parent()
                views.follow("charts")
                views.charts_drawn()
                save(page, folder / "mlflow-charts.png")
                views.parent()
                views.follow("compare")
                views.compare_drawn()
                save(page, folder / "mlflow-compare.png")
                views = pages.Views(page, server.uri, other["experiment"], other["run"])
                views.figure("blocks")
                save(page, folder / "mlflow-blocks.png")
            report(home, names[0], folder)
            site(home, folder)
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
