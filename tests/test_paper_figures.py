"""Statements of experiments/paper/README.md about records: each has one."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

import pytest

from tests.support.records import CPU, PAPER, ROOT, page, rows

if TYPE_CHECKING:
    from collections.abc import Callable


def returns(name: str) -> list[float]:
    """Returns the scores of the seeds of a record, in percent."""
    return [100 * row["score"] for row in rows(f"{CPU}.{name}.json") if row["status"] == "ok"]


def trajectories(name: str) -> list[str]:
    scores = returns(name)
    return [", ".join(f"{score:.0f}" for score in scores), f"{statistics.mean(scores):.1f}"]


def gain() -> list[str]:
    """Returns the mean gain of the seeds and half of its interval (Student's t of 5)."""
    few, many = returns("table5_few"), returns("table5")
    gains = [after - before for before, after in zip(few, many, strict=True)]
    width = 2.776 * statistics.stdev(gains) / len(gains) ** 0.5
    return [f"{statistics.mean(gains):.1f}", f"{width:.1f}"]


def retrieved(trained: int) -> list[str]:
    """Returns the means over depths by length, in percent."""
    (row,) = (
        row
        for row in rows(f"{CPU}.figure3.json")
        if row["seq_len"] == trained and row["status"] == "ok"
    )
    return [f"{100 * row[f'score {length}']:.0f}" for length in (128, 256, 512, 1024)]


def on_rings() -> list[str]:
    longest: dict[int, int] = {}
    for row in rows(f"{CPU}.figure1.json"):
        if row["status"] == "ok":
            longest[row["ring_size"]] = max(longest.get(row["ring_size"], 0), row["seq_len"])
    assert sorted(longest) == [1, 2, 4, 8]
    alone = longest.pop(1)
    pairs = ((f"{tokens:,}", f"{tokens / alone:.2f}") for tokens in longest.values())
    return [f"{alone:,}", *(figure for pair in pairs for figure in pair)]


def on_one_rank() -> list[str]:
    longest: dict[tuple[str, bool], int] = {}
    for row in rows(f"{CPU}.figure1_alone.json"):
        cell = row["scores"], row["mlp_rows"] is None
        if row["status"] == "ok":
            longest[cell] = max(longest.get(cell, 0), row["seq_len"])
    vanilla, plain, blockwise = (
        longest[cell] for cell in (("whole", True), ("blockwise", True), ("blockwise", False))
    )
    return [str(vanilla), f"{plain:,}", f"{blockwise:,}", f"{blockwise / vanilla:.1f}"]


def tokens_per_second() -> list[str]:
    (line,) = [line for line in rows(f"{CPU}.table4.json") if line.startswith("tiny")]
    ratio, alone, ring = re.findall(r"\d[\d.,]*\d", line.split("process")[1])
    return [ratio, ring, alone]


FIGURES: tuple[tuple[str, Callable[[], list[str]]], ...] = (
    ("cores: {} at 16k tokens, {} over {}", tokens_per_second),
    (
        """vanilla attention {}, blockwise attention {} with a plain MLP, {} ({} times vanilla)
        with a blockwise one""",
        on_one_rank,
    ),
    ("| 1 | {} | 1 | | 2 | {} | {} | | 4 | {} | {} | | 8 | {} | {} |", on_rings),
    (
        "| trained at 128, one rank | {}% | {}% | {}% | {}% |",
        lambda: retrieved(128),
    ),
    (
        "| trained at 512, ring of 4 | {}% | {}% | {}% | {}% |",
        lambda: retrieved(512),
    ),
    ("table5_few.json)) | {}% | {}% |", lambda: trajectories("table5_few")),
    ("table5.json)) | {}% | {}% |", lambda: trajectories("table5")),
    ("| gain | | {} ± {} points (95%) |", gain),
)


@pytest.mark.parametrize(("sentence", "figures"), FIGURES)
def test_the_page_says_what_its_record_holds(
    sentence: str, figures: Callable[[], list[str]]
) -> None:
    assert " ".join(sentence.split()).format(*figures()) in page(PAPER)


def test_what_was_trained_here_has_its_record() -> None:
    measured = (ROOT / PAPER).read_text().split("## Measured here")[1].split("\n## ")[0]
    parts = re.split(r"^\*\*(\w+ \d)\*\*", measured, flags=re.M)[1:]
    assert parts[::2] == ["Figure 1", "Figure 3", "Table 4", "Table 5"]
    assert all("[record](../results/" in text for text in parts[1::2])
