"""MLflow's pages of a sweep: summary, figures, charts and parallel coordinates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ringray.lab.driver.observer import SyncState
from ringray.lab.store.store import Store
from ringray.lab.tracking.tracker import sync
from ringray.lab.trial.outcome import Outcome
from tests.browser import pages
from tests.support import figure_rows, tracking_store
from tests.support.tracking_servers import sqlite_server
from tests.support.tracking_store import DIGEST

if TYPE_CHECKING:
    from ringray.lab.trial.outcome import TrialInfo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(pages.program() is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pages.Views]:
    """A sweep of 16 trials on a real server, and a browser that looks at it."""
    pytest.importorskip("playwright", reason="pip install playwright")
    folder = tmp_path_factory.mktemp("pages")
    server = sqlite_server(
        folder / "server", tracking_store.make_schema(tmp_path_factory.mktemp("schema"))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGRAY_HOME", str(folder))
        server.start()
        try:
            with Store(folder / "store.db") as store:
                _record(store)
                assert sync(store.path, DIGEST, server.uri, "quick") == SyncState(16, 0, None)
            (parent,), _ = tracking_store.runs(server.uri)
            with pages.opened() as page:
                yield pages.Views(page, server.uri, parent.info.experiment_id, parent.info.run_id)
        finally:
            server.stop()


def _record(store: Store) -> None:
    rows = figure_rows.strategies()
    planned = [_info(row) for row in rows]
    tracking_store.begin(store, planned)
    for row in rows:
        metrics = row.metrics | {"cpu_percent": 97.0, "rss_bytes": 5e8}
        outcome = Outcome("ok", None, metrics, {}, f"{row.index:064x}", 1, 1e9, 1e9 + 1)
        store.record(DIGEST, row.key, outcome)
    store.finish(DIGEST, "complete")


def _info(row: figure_rows.TrialRow) -> TrialInfo:
    from ringray.lab.trial.outcome import TrialInfo

    return TrialInfo(row.key, row.index, row.config, {"time_ms": 1.0})


def test_the_parent_run_shows_what_is_fastest_and_the_figures(views: pages.Views) -> None:
    views.parent()
    page = views.page
    assert page.get_by_text("16 of 16 trials ended: 16 ok").first.is_visible()
    answer = page.get_by_text("2,048 tokens forward: contiguous ring is the fastest").first
    assert answer.is_visible()
    counts = page.get_by_text("16 of 16 trials ended: 16 ok").first
    above, below = answer.bounding_box(), counts.bounding_box()
    assert above
    assert below
    assert above["y"] < below["y"]
    images = page.locator("img[src*=get-artifact]")
    assert images.count() == 5
    for at in range(5):
        assert images.nth(at).evaluate("one => one.naturalWidth") > 500


def test_figures_are_shown_inline_among_the_artifacts(views: pages.Views) -> None:
    views.figure("pareto")
    for name in ("memory", "pareto", "speedup", "throughput"):
        views.page.get_by_text(f"{name}.png").first.wait_for()
    shown = views.page.locator("img[src^=blob], img[src*=get-artifact], img[src^=data]").first
    assert shown.evaluate("one => one.naturalWidth") > 500


def test_the_description_leads_to_the_report(views: pages.Views) -> None:
    views.parent()
    views.follow("report")
    report = views.page.frame_locator("iframe")
    report.get_by_role("heading", name="Speed-up over SDPA with 2 threads").wait_for()
    report.locator("figure").first.scroll_into_view_if_needed()
    report.locator("figure svg").first.wait_for()
    assert report.locator("table.sorts tbody tr").count() == 16


def test_the_description_leads_to_charts_of_the_trials(views: pages.Views) -> None:
    views.parent()
    views.follow("charts")
    views.charts_drawn()
    page = views.page
    assert page.get_by_text("16 matching runs").first.is_visible()
    names = page.locator("body").inner_text()
    for name in ("median_ms", "peak_memory_bytes", "System metrics"):
        assert name in names
    bars = page.locator(".js-plotly-plot").first.locator(".bars .point").count()
    assert bars > 1, "a chart shows one run only"


def test_the_description_leads_to_parallel_coordinates(views: pages.Views) -> None:
    views.parent()
    views.follow("compare")
    views.compare_drawn()
    assert views.page.get_by_text("Comparing 16 Runs").first.is_visible()
    axes = views.axes()
    assert axes == ["direction", "partition", "seq_len", "median_ms"]
    # A param that is a number in every trial has an axis of numbers and not of words.
    ticks = views.page.locator(".parcoords .y-axis").nth(axes.index("seq_len"))
    found = [text for text in ticks.locator(".tick text").all_text_contents() if text.strip()]
    values = [float(text.replace(",", "").replace("k", "e3")) for text in found]
    assert values == sorted(values) or values == sorted(values, reverse=True)
    assert len(values) > 2
