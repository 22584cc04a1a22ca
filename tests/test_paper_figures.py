"""What experiments/paper/README.md says of records, and that all of it has one."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

import pytest

from tests.support.records import CPU, MIB, PAPER, ROOT, page, rows

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


def ruled_out() -> list[str]:
    """Returns the MiB per rank of both trainings, and those predicted of one rank."""
    lines = rows(f"{CPU}.figure3.json")
    (both,) = {f"{row['peak_memory_bytes'] / MIB:.0f}" for row in lines if row["status"] == "ok"}
    (reason,) = (row["reason"] for row in lines if row["status"] == "pruned")
    return [both, re.findall("predicted ([0-9.]+) MiB", reason)[0]]


def trained_memory() -> list[str]:
    """Returns the MiB per rank with few trajectories and with many, and those predicted of one
    rank with many."""
    few, many = (
        max(row.get("peak_memory_bytes", 0) / MIB for row in rows(f"{CPU}.{name}.json"))
        for name in ("table5_few", "table5")
    )
    (predicted,) = {
        re.findall("predicted ([0-9.]+) MiB", row["reason"])[0]
        for row in rows(f"{CPU}.table5.json")
        if row["status"] == "pruned"
    }
    return [f"{few:.1f}", f"{many:.1f}", predicted]


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


def ratio(name: str, cell: str) -> str:
    (line,) = [line for line in rows(f"paper.{name}.json") if line.startswith(f"{cell} ")]
    return str(line.removeprefix(cell).split()[2])


def within_two() -> list[str]:
    ratios = [
        float(line.removeprefix(match[0]).split()[2])
        for line in rows("paper.table3.json")
        if (match := re.match(r".*(vanilla|attention|MLP|ring)  ", line))
    ]
    near = sum(0.5 <= ratio <= 2 for ratio in ratios)
    return [str(near), str(len(ratios)), str(sum(ratio == 1 for ratio in ratios))]


def utilization() -> list[str]:
    lines = [line for line in rows("paper.table4.json") if "MFU: " in line]
    return [number for line in lines for number in re.findall(r"(\d+)%", line)]


def table_1() -> list[str]:
    cells = "ring, attention, 6bch", "memory-efficient, attention, 2bsh + 4bch"
    return [f"{float(ratio('table1', cell)):.2f}" for cell in cells]


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
    (
        "3,000 steps (rotary base 1,000), {} MiB of tensors per rank in both",
        lambda: ruled_out()[:1],
    ),
    ("512 tokens on one rank are ruled out: {} MiB, limit 32.", lambda: ruled_out()[1:]),
    ("table5_few.json)) | {}% | {}% |", lambda: trajectories("table5_few")),
    ("table5.json)) | {}% | {}% |", lambda: trajectories("table5")),
    ("| gain | | {} ± {} points (95%) |", gain),
    (
        """{} MiB per rank on one rank with 4 trajectories (132 tokens) and {} MiB on each of four
        with 16 (528 tokens); 16 on one rank are ruled out: {} MiB predicted""",
        trained_memory,
    ),
    ("{} of {} cells within a factor of two, {} equal", within_two),
    (
        "a rank of the ring has 24bch, not 6bch ({}), and memory-efficient attention 2bsh ({})",
        table_1,
    ),
    (
        """7B on 8 A100 at 256k {}%, {}%, {}%; 13B on 8 at 128k {}%, {}%, {}%; 13B on 32 at 2M
        {}%, {}%, {}%; 30B on 512 chips of TPU v4 at 2M {}%, {}%, {}%; 65B at 1M {}%, {}%,
        {}%.""",
        utilization,
    ),
)


@pytest.mark.parametrize(("sentence", "figures"), FIGURES)
def test_the_page_says_what_its_record_holds(
    sentence: str, figures: Callable[[], list[str]]
) -> None:
    assert " ".join(sentence.split()).format(*figures()) in page(PAPER)


def test_table_3_of_the_paper_is_that_of_its_record() -> None:
    lines = rows("paper.table3.json")
    for where, size, *cells in re.findall(
        r"^\| (.+), (\d+B) \| (.+) \| (.+) \| (.+) \| (.+) \|$", (ROOT / PAPER).read_text(), re.M
    ):
        recorded = []
        for line in lines:
            if line.startswith(f"{where}, {size}, "):
                printed, ours = re.findall(r"  +([\d.,]+)(?=  )", line)[:2]
                recorded.append("/".join(number.removesuffix(".00") for number in (printed, ours)))
        shown = [re.sub(r"[* ]", "", cell) for cell in cells]
        assert shown == [re.sub(r"\.0\b", "", pair) for pair in recorded], (where, size)


def test_what_was_trained_here_has_its_record() -> None:
    measured = (ROOT / PAPER).read_text().split("## Measured here")[1].split("\n## ")[0]
    parts = re.split(r"^\*\*(\w+ \d)\*\*", measured, flags=re.M)[1:]
    assert parts[::2] == ["Figure 1", "Figure 3", "Table 4", "Table 5"]
    assert all("[record](../results/" in text for text in parts[1::2])
