"""The page of a comparison in headless Chromium, as CI keeps it for a person who decides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ringray.lab import cli
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import record_line
from tests.browser import pages
from tests.support import report_store

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(pages.program() is None, reason="no Chromium: apt-get install chromium"),
]
ROWS = "[...document.querySelector('table.sorts').tBodies[0].rows].filter(row => !row.hidden)"
CELLS = f"{ROWS}.map(row => [...row.cells].map(cell => cell.textContent))"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """The comparison of a sweep with one that takes twice as long, and asks for nothing else."""
    pytest.importorskip("playwright", reason="pip install playwright")
    monkeypatch.chdir(tmp_path)
    with Store(report_store.write(tmp_path / "a.db")) as store:
        (sweep,) = store.sweeps()
        lines = [
            json.dumps(record_line(sweep, replace(row, metrics={
                name: value * (2 if name == "median_ms" else 1)
                for name, value in row.metrics.items()
            })))
            for row in store.trials(sweep.digest)
        ]  # fmt: skip
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    given = ["a.db", "b.jsonl", "--html", "page.html", "--fail-above", "5%"]
    assert cli.main(["compare", *given]) == 1
    address = (tmp_path / "page.html").as_uri()
    with pages.opened() as opened:
        noted = pages.noted(opened)
        opened.goto(address)
        yield opened
    assert set(noted) == {address}


def test_the_answer_comes_first_and_points_filter_and_sort(page: Page) -> None:
    text = page.locator("body").inner_text()
    assert "B is slower: median_ms +100.0%" in text
    assert "regression: B as a whole is slower by more than 5%" in text
    assert page.evaluate("window.evil") is None
    every = page.evaluate(CELLS)
    assert len(every) == 17
    heads = page.locator("table.sorts thead th").all_text_contents()
    page.locator("table.sorts").get_by_role("button", name="A median ms").click()
    column = [row[heads.index("A median ms")] for row in page.evaluate(CELLS)]
    numbers = [float(value) for value in column if value != "–"]
    assert numbers == sorted(numbers)
    page.get_by_label("Filter").fill("zigzag not decided")
    found = page.evaluate(CELLS)
    assert 0 < len(found) < 17
    assert all({"zigzag", "not decided"} <= set(row) for row in found)


def test_it_is_readable_in_the_dark_and_without_scripts(page: Page) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) == "rgb(21, 24, 29)"
    page.context.new_cdp_session(page).send("Emulation.setScriptExecutionDisabled", {"value": True})
    page.reload()
    assert page.get_by_label("Filter").count() == 0
    assert len(page.locator("table.sorts tbody tr").all()) == 17
    assert "B is slower" in page.locator("body").inner_text()
