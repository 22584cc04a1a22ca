"""``make screenshots``: the pictures of the README and the docs, from real sweeps.

Measures small sweeps on this machine, tracks them on an MLflow server of its own, and has MLflow's
pages, a report, a comparison and pages of the site drawn by a Chromium that is installed. Takes
three minutes.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tests.browser import pages
from tests.support import programs, tracking_store
from tests.support.place import REPOSITORY, Place
from tests.support.tracking_servers import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

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


def ringray(place: Place, *words: object) -> None:
    """Runs ``ringray WORDS`` to its end."""
    done = place.run(*words, stdout=None, stderr=None, start_new_session=False)
    assert done.code == 0, words


def tracked(uri: str, name: str) -> dict[str, Any]:
    """Returns MLflow's place of a sweep."""
    (parent,), children = tracking_store.runs(uri, name)
    trials = [run.info.run_id for run in children.values()]
    return {"experiment": parent.info.experiment_id, "run": parent.info.run_id, "trials": trials}


def save(page: Page, path: Path, clip: dict[str, float] | None = None) -> None:
    """A picture of the page with 128 colours, which is a third of its size."""
    from PIL import Image

    png = page.screenshot(clip=clip)  # type: ignore[arg-type]
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(128)
    picture.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size >> 10} KiB")


def report(place: Place, name: str, folder: Path) -> None:
    """Pictures of a sweep's report at two widths, and of the comparison of two others."""
    ringray(place, "report", name, "-o", "report.html")
    for store in ("before.db", "after.db") * 4:  # in turns
        spec = REPOSITORY / "experiments" / "compare.yaml"
        ringray(place, "run", spec, "--store", store, "--again")
    ringray(place, "compare", "before.db", "after.db", "--html", "compare.html")
    for file, picture, width, height in (
        ("report", "report", 1280, 1500),
        ("report", "report-narrow", 400, 1500),
        ("compare", "compare", 1040, 900),
    ):
        with pages.opened(width, height) as page:
            page.goto((place.home / f"{file}.html").as_uri())
            save(page, folder / f"{picture}.png")


def site(home: Path, folder: Path) -> None:
    """Pictures of pages of the documentation."""
    to = pages.site(home / "site")
    for name in SITE:
        with pages.opened(1280, 800) as page:
            page.goto((to / "docs" / f"{name}.html").as_uri())
            page.wait_for_timeout(1000)
            save(page, folder / f"site-{name}.png")


def main() -> int:
    """Writes the pictures into the folder that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=REPOSITORY / "docs" / "images")
    folder = parser.parse_args().folder
    if programs.browser() is None:
        print("no Chromium on this machine (Debian: apt-get install chromium)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ringray-shots-") as temporary:
        home = Path(temporary)
        server = Server(home, f"sqlite:///{home}/server.db")
        server.start()
        place = Place(home, home, {"MLFLOW_TRACKING_URI": server.uri}, unset=("RAY_TMPDIR",))
        try:
            specs = [place.spec(text) for text in (STRATEGIES, BLOCKS)]
            for spec in specs:
                ringray(place, "run", spec)
            strategies, other = (tracked(server.uri, spec.stem) for spec in specs)
            with pages.opened(1440, 900) as page:
                views = pages.Views(page, server.uri, strategies["experiment"], strategies["run"])
                views.parent()
                save(page, folder / "mlflow-parent.png")
                views.figure("pareto")
                save(page, folder / "mlflow-figures.png")
                views.follow("charts")
                page.locator(".js-plotly-plot .main-svg").first.wait_for()
                page.wait_for_timeout(1500)
                save(page, folder / "mlflow-charts.png")
                runs, of = (
                    quote(json.dumps(ids))
                    for ids in (strategies["trials"], [strategies["experiment"]])
                )
                page.goto(f"{server.uri}/#/compare-runs?runs={runs}&experiments={of}")
                page.locator(".parcoords").first.wait_for()
                page.wait_for_timeout(1000)
                save(page, folder / "mlflow-compare.png")
                views = pages.Views(page, server.uri, other["experiment"], other["run"])
                views.figure("blocks")
                save(page, folder / "mlflow-blocks.png")
            report(place, specs[0].stem, folder)
            site(home, folder)
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
