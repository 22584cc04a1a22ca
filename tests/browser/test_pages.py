"""Pages of ours open without an error, ask nobody else for anything, and show their tables."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ringray.lab import cli
from ringray.lab.store.store import Store
from ringray.lab.tracking.tracker import sync
from ringray.lab.trial.outcome import SyncState, record_line
from tests.browser import pages
from tests.support import report_store, tracking_store
from tests.support.place import REPOSITORY
from tests.support.tracking_servers import sqlite_server

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.browser
def test_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report_store.write(tmp_path / "store.db")
    assert cli.main(["report", "which-ring", "--store", "store.db", "-o", "report.html"]) == 0
    with pages.watched((tmp_path / "report.html").as_uri()) as page:
        assert page.evaluate("window.evil") is None
        rows = page.locator("table.sorts").first.locator("tbody tr:not([hidden])")
        assert rows.count() == 18
        page.get_by_label("Filter").first.fill("zigzag  Allgather 2048")
        assert rows.count() == 2


@pytest.mark.slow
@pytest.mark.browser
def test_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sweep with one that takes twice as long."""
    monkeypatch.chdir(tmp_path)
    with Store(report_store.write(tmp_path / "a.db")) as store:
        (sweep,) = store.sweeps()
        lines = []
        for row in store.trials(sweep.digest):
            factors = {name: 2 if name == "median_ms" else 1 for name in row.metrics}
            metrics = {name: value * factors[name] for name, value in row.metrics.items()}
            lines.append(json.dumps(record_line(sweep, replace(row, metrics=metrics))))
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    options = ["a.db", "b.jsonl", "--html", "page.html", "--fail-above", "5%"]
    assert cli.main(["compare", *options]) == 1
    with pages.watched((tmp_path / "page.html").as_uri()) as page:
        assert "B is slower: median_ms +100.0%" in page.locator("body").inner_text()
        assert page.evaluate("window.evil") is None
        assert page.locator("table.sorts tbody tr").count() == 17


@pytest.mark.exhaustive
@pytest.mark.browser
def test_the_runs_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description of a parent run has the answer, and its links lead somewhere."""
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path))
    server = sqlite_server(tmp_path / "server", tracking_store.make_schema(tmp_path / "schema"))
    server.start()
    try:
        path = report_store.write(tmp_path / "store.db", "quick", tracking_store.DIGEST)
        state = sync(path, tracking_store.DIGEST, server.uri, "quick")
        assert state == SyncState(18, 0, None)
        (parent,), _ = tracking_store.runs(server.uri)
        run = parent.info
        with pages.opened() as page:
            views = pages.Views(page, server.uri, run.experiment_id, run.run_id)
            views.parent()
            assert page.get_by_text("18 of 18 trials ended").first.is_visible()
            assert page.get_by_text("ring is the fastest").first.is_visible()
            views.figure("pareto")
            views.follow("report")
            rows = page.frame_locator("iframe").locator("table.sorts").first.locator("tbody tr")
            rows.first.wait_for()
            assert rows.count() == 18
            views.follow("charts")
            page.locator(".js-plotly-plot .main-svg").first.wait_for()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built as `make docs` does: a broken link ends it."""
    pytest.importorskip("mkdocs", reason="pip install 'ringray[docs]'")
    return pages.site(tmp_path_factory.mktemp("site"), "--strict", http_proxy="http://127.0.0.1:9")


@pytest.mark.slow
def test_every_page_of_the_repository_is_in_the_site(site: Path) -> None:
    for source in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]:
        name = source.relative_to(REPOSITORY).with_suffix(".html")
        assert (site / ("index.html" if name.stem == "README" else name)).is_file(), name
    assert "<!-- generated" not in (site / "docs" / "choosing.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.browser
def test_the_site_opens_from_the_disk_and_is_searched(site: Path) -> None:
    with pages.watched((site / "docs" / "concepts.html").as_uri()) as page:
        assert page.locator("svg.drawn").count() == 9
        field = page.locator(".md-search__input")
        field.fill("global_tokens")
        field.press("End")  # it listens to keys
        page.locator('.md-search-result__link[href*="specs.html"]').first.wait_for(state="attached")
