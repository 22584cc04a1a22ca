"""The report of a sweep in headless Chromium, as a colleague opens it who was sent the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ringray.lab import cli
from ringray.lab.store import traces
from tests.browser import pages
from tests.lab.store.test_traces import reports
from tests.support import report_store

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(pages.program() is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of 18 trials, 16 of them measured, with a timeline."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGRAY_HOME", str(folder / "home"))
        store = report_store.write(folder / "store.db")
        traces.write(traces.path_of(report_store.DIGEST, f"{0:016x}"), reports(2))
        out = folder / "report.html"
        assert cli.main(["report", "which-ring", "--store", str(store), "-o", str(out)]) == 0
    return out.as_uri()


@pytest.fixture(scope="module")
def opened() -> Iterator[Page]:
    """A browser."""
    pytest.importorskip("playwright", reason="pip install playwright")
    with pages.opened() as page:
        yield page


@pytest.fixture(scope="module")
def noted(opened: Page) -> list[str]:
    """What the report asks for and complains of."""
    return pages.noted(opened)


@pytest.fixture(scope="module")
def page(opened: Page, noted: list[str], address: str) -> Page:
    """The report in a browser."""
    opened.goto(address)
    return opened


def test_every_figure_is_a_picture(page: Page) -> None:
    assert page.locator("figure").count() == 5
    assert page.locator("figure svg").count() == 5
    for box in page.locator("figure svg").evaluate_all("all => all.map(x => x.clientWidth)"):
        assert 300 < box < 1000
    assert page.evaluate("window.evil") is None


def table(page: Page) -> list[list[str]]:
    found: list[list[str]] = page.evaluate(
        "[...document.querySelector('table.sorts').tBodies[0].rows].filter(row => !row.hidden)"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return found


def column(page: Page, name: str) -> int:
    heads = page.locator("table.sorts").first.locator("thead th").all_text_contents()
    return heads.index(name)


def test_columns_sort_as_numbers_and_by_keyboard(page: Page) -> None:
    at = column(page, "median ms")
    head = page.locator("table.sorts").first.locator("thead th").nth(at)
    head.get_by_role("button").focus()
    for direction in ("ascending", "descending"):
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == direction
        values = [row[at] for row in table(page)]
        numbers = [float(value) for value in values[:16]]
        assert numbers == sorted(numbers, reverse=direction == "descending")
        assert values[16:] == ["–", "–"], "what was not measured comes last, always"
    page.locator("table.sorts").first.get_by_role("button", name="#").click()
    assert [row[0] for row in table(page)] == [str(number + 1) for number in range(18)]


def test_the_filter_keeps_rows_with_all_words(page: Page) -> None:
    field = page.get_by_label("Filter").first
    field.fill("zigzag  Allgather 2048")
    rows = table(page)
    assert len(rows) == 2
    assert all("zigzag" in row and "allgather" in row for row in rows)
    assert page.locator("output").first.inner_text() == "2 of 18 rows"
    field.fill("nothing like it")
    assert table(page) == []
    field.fill("")
    assert len(table(page)) == 18


def test_light_and_dark_differ_and_print_is_light(page: Page) -> None:
    found = []
    for scheme, media in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        page.emulate_media(color_scheme=scheme, media=media)  # type: ignore[arg-type]
        found.append(
            page.evaluate(
                "[getComputedStyle(document.documentElement).backgroundColor, getComputedStyle("
                "document.querySelector('figure svg .role-axis-label text')).fill]"
            )
        )
    page.emulate_media(color_scheme="light", media="screen")
    light = ["rgb(255, 255, 255)", "rgb(89, 89, 89)"]
    assert found == [light, ["rgb(21, 24, 29)", "rgb(168, 176, 186)"], light]


MEASURES = """() => ({
  page: document.documentElement.scrollWidth,
  texts: [...document.querySelectorAll("figure svg")].map((svg) => Math.min(
    ...[...svg.querySelectorAll("text")].map((one) => parseFloat(getComputedStyle(one).fontSize)
      * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width))),
  figures: [...document.querySelectorAll(".chart")].map((one) => one.scrollWidth - one.clientWidth),
  boxes: [...document.querySelectorAll(".wide")].map((box) => {
    const row = box.querySelector("tbody tr");
    const [first, last] = [row.cells[0], row.cells[row.cells.length - 1]];
    const frame = box.getBoundingClientRect();
    box.scrollLeft = 1e6;
    const ends = last.getBoundingClientRect().right - frame.left - box.clientWidth;
    const [starts, ink] = [first.getBoundingClientRect().left - frame.left,
                           getComputedStyle(first).backgroundColor];
    const share = first.offsetWidth / box.clientWidth;
    const scrolls = box.scrollLeft;
    box.scrollLeft = 0;
    const cells = [...box.querySelectorAll("th, td")];
    const cut = cells.filter((one) => one.scrollWidth > one.offsetWidth);
    return { ends, starts, ink, share, scrolls, cut: cut.map((one) => one.textContent) };
  }),
})"""


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_cut_or_too_small_at_any_width(page: Page, address: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 860})
    page.goto(address)
    found = page.evaluate(MEASURES)
    assert found["page"] <= width
    assert min(found["texts"]) >= 10.5
    if width == 1280:
        assert not any(found["figures"])
        assert not any(box["scrolls"] for box in found["boxes"])
    assert len(found["boxes"]) == 2
    for box in found["boxes"]:
        assert abs(box["starts"]) <= 1, "the first column stays"
        assert box["ends"] <= 1, "the last column can be reached"
        assert box["ink"] == "rgb(255, 255, 255)", "others pass below it"
        assert box["share"] < 0.5
        assert box["cut"] == []
    page.set_viewport_size({"width": 1280, "height": 860})


def test_without_scripts_everything_can_be_read(page: Page) -> None:
    page.context.new_cdp_session(page).send("Emulation.setScriptExecutionDisabled", {"value": True})
    page.reload()
    assert page.get_by_label("Filter").count() == 0
    assert page.locator("figure svg").count() == 5
    titles = page.locator("figure svg title").all_text_contents()  # which the pointer shows
    assert len(titles) > 50
    assert any("strategy: zigzag allgather" in title and "GFLOP/s" in title for title in titles)
    assert page.locator("table.sorts").first.locator("tbody tr").count() == 18
    text = page.locator("body").inner_text()
    for said in ("2,048 tokens forward: contiguous ring is the fastest", "it broke </script>"):
        assert said in text


def test_nothing_was_asked_for_and_nothing_complained(
    page: Page, noted: list[str], address: str
) -> None:
    assert page.url == address
    assert set(noted) == {address}
