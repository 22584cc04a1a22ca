"""``make screenshots``: the pictures of docs/mlflow.md, docs/report.md and the README, from real
sweeps.

Measures two small sweeps on this machine, tracks them on an MLflow server of its own and has the
pages drawn by a Chromium that is installed. Takes two minutes.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def sweep(text: str, home: Path, uri: str) -> dict[str, Any]:
    """Runs a spec; where MLflow has it."""
    name = text.split("name: ")[1].split()[0]
    (home / f"{name}.yaml").write_text(text)
    environment = os.environ | {
        "RINGRAY_HOME": str(home),
        "MLFLOW_TRACKING_URI": uri,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    }
    subprocess.run(
        [sys.executable, "-m", "ringray", "run", f"{name}.yaml"],
        cwd=home,
        env=environment,
        check=True,
    )
    (parent,), _ = tracking_store.runs(uri, name)
    return {
        "experiment": parent.info.experiment_id,
        "run": parent.info.run_id,
    }


def save(page: Page, path: Path, clip: dict[str, float] | None = None) -> None:
    """A picture of the page with 128 colours, which is a third of its size."""
    from PIL import Image

    png = page.screenshot(clip=clip)  # type: ignore[arg-type]
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(128)
    picture.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size >> 10} KiB")


def report(home: Path, to: Path) -> None:
    """A picture of the first sweep's report, whose charts are drawn."""
    environment = os.environ | {
        "RINGRAY_HOME": str(home),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    }
    out = home / "report.html"
    command = [sys.executable, "-m", "ringray", "report", "which-strategy", "-o", str(out)]
    subprocess.run(command, cwd=home, env=environment, check=True)
    with pages.opened(1040, 1500) as page:
        page.goto(out.as_uri())
        for figure in page.locator("figure").all():
            figure.scroll_into_view_if_needed()
            figure.locator(".vega-embed svg").wait_for()
        page.evaluate("scrollTo(0, 0)")
        save(page, to)


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
            one, other = (sweep(text, home, server.uri) for text in (STRATEGIES, BLOCKS))
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
            report(home, folder / "report.png")
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
