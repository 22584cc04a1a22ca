"""Statements of README and docs about records: a sentence, and the figures that stand in it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from functools import partial
from itertools import chain, product

import pytest

from tests.support import packed_rows, published_rows
from tests.support.records import CPU, MIB, PAPER, ROOT, gpu_lines, page, rows


def rates(direction: str, mask: str) -> list[str]:
    """Returns the rates of the contenders on an H100, ours first."""
    lines = [x for name in ("first_light", "defaults") for x in gpu_lines(f"gpu-h100.{name}.jsonl")]
    case = f"{direction}/{mask}/16k/d128/h16/bf16"
    tflops = {x["contender"]: x["tflops"] for x in lines if x["case"] == case and x["tflops"]}
    tflops["flex"] = max(tflops["flex"], tflops["flex-tuned"])
    names = ("ringray", "ringray-portable", "sdpa-cudnn", "flex", "sdpa-flash")
    return [f"{tflops[name]:.0f}" for name in names]


def both_rates(direction: str) -> list[str]:
    """Returns causal and full ones in turns, without those of our portable kernels."""
    pairs = zip(rates(direction, "causal"), rates(direction, "full"), strict=True)
    return [rate for place, pair in enumerate(pairs) if place != 1 for rate in pair]


def correctness() -> list[str]:
    trials = rows(f"{CPU}.correctness.json")
    assert {row["status"] for row in trials} == {"ok"}
    worst = [
        max(
            value
            for row in trials
            for key, value in row.items()
            if row["dtype"] == dtype and key.startswith("error_")
        )
        for dtype in ("float32", "bfloat16", "float16")
    ]
    return [f"{sum(row['trials'] for row in trials):,}", *(f"{value:.2f}" for value in worst)]


def sdpa(dtype: str, direction: str) -> list[str]:
    (row,) = [
        row["metrics"]
        for row in rows(f"{CPU}.cpu_ratio.jsonl")
        if (row["config"]["dtype"], row["config"]["direction"]) == (dtype, direction)
    ]
    return [
        f"{row['median_ms']:,.0f}",
        f"{row['baseline_ms']:,.0f}",
        f"{row['ratio']:.2f}",
        f"{row['peak_memory_bytes'] / MIB:.0f}",
        f"{row['sent_bytes'] / MIB:.0f}",
    ]


def ring_sizes() -> list[str]:
    cells = {
        (row["config"]["dtype"], row["config"]["ring_size"]): row["metrics"]
        for row in rows(f"{CPU}.ring_sizes.jsonl")
    }
    ratios = [
        f"{cells[dtype, size]['ratio']:.2f}" for dtype in ("float32", "bfloat16") for size in (4, 8)
    ]
    return ratios + [f"{cells['float32', n]['peak_memory_bytes'] / MIB:.0f}" for n in (4, 8)]


def decoding() -> list[str]:
    trials = {row["config"]["dtype"]: row["metrics"] for row in rows(f"{CPU}.decode.jsonl")}
    times = [
        f"{trials[dtype][which]:.1f}"
        for dtype in ("float32", "bfloat16")
        for which in ("median_ms", "baseline_ms")
    ]
    return [*times, f"{trials['float32']['sent_bytes']:,}"]


def answers() -> list[str]:
    """Returns the longest answers of advise, on few ranks and on many."""
    lines = [re.findall(r"[\d.]+ s", line) for line in rows(f"{CPU}.advise_seconds.json")]
    few, many = zip(*((line[:2], line[2:]) for line in lines if line), strict=True)
    return [max(chain(*some), key=lambda text: float(text.split()[0])) for some in (few, many)]


def alarms() -> list[str]:
    """Returns the largest share of comparisons of A with A that show a change, in percent."""
    shares = [re.search(r"alarms ([\d.]+)%", line) for line in rows("compare.answers.json")]
    return [f"{max(float(share[1]) for share in shares if share)}"]


def slower_sweeps(noise: str) -> list[str]:
    lines = [line for line in rows("compare.answers.json") if line.startswith(f"{noise}, ")]
    return [line.rpartition(" ")[2] for line in lines]


def figure(name: str, title: str) -> str:
    """Returns the first number of the line that begins with a title."""
    (line,) = [line for line in rows(f"{CPU}.{name}.json") if line.startswith(f"{title} ")]
    return re.findall(r"[\d.,]+%?", line.removeprefix(title))[0]


# Trainings of the paper


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


FIGURES: tuple[tuple[str, str, Callable[[], list[str]]], ...] = (
    *(
        ("docs/kernels.md", f"{' '.join(what)} | {' | '.join(['{}'] * 5)} |", partial(rates, *what))
        for what in product(("forward", "backward"), ("causal", "full"))
    ),
    *(
        ("README.md", " | ".join(["{}, {}"] * 4), partial(both_rates, direction))
        for direction in ("forward", "backward")
    ),
    (
        "docs/concepts.md",
        """all {} combinations are within the budget; the worst tensor uses {} of it in float32,
        {} in bfloat16 and {} in float16""",
        correctness,
    ),
    *(
        ("README.md", f"| {title} | {{}} ms | {{}} ms | {{}} | {{}} MiB | {{}} MiB |", figures)
        for title, figures in (
            ("float32 forward", partial(sdpa, "float32", "forward")),
            ("float32 forward + backward", partial(sdpa, "float32", "forward+backward")),
            ("bfloat16 forward", partial(sdpa, "bfloat16", "forward")),
            ("bfloat16 forward + backward", partial(sdpa, "bfloat16", "forward+backward")),
        )
    ),
    (
        "docs/concepts.md",
        """rings of 4 and 8 take {} and {} times SDPA's time in float32 (forward and backward),
        {} and {} times in bfloat16, with {} and {} MiB per rank""",
        ring_sizes,
    ),
    (
        "docs/decoding.md",
        """{} against {} ms in float32 and {} against {} ms in bfloat16, 1.6 times as fast; both
        ranks together send {} bytes a step""",
        decoding,
    ),
    (
        "docs/concepts.md",
        """158 figures that others published: the median error is {}, where a null model that
        knows the rate of one device alone has {}; on rings {} against {}""",
        lambda: [*published_rows.sums("rows")[::3], *published_rows.sums("rings")[::3]],
    ),
    *(
        (
            "docs/prediction.md",
            f"| {title} | median error {{}}, {words} {{}}",
            lambda names=names: [figure("prediction", name) for name in names],
        )
        for title, words, *names in (
            ("time", "90th percentile", "median_error", "p90_error"),
            ("memory per rank", "largest", "median_memory_error", "worst_memory_error"),
        )
    ),
    *(
        (
            "docs/published.md",
            f"| {number} {group} | {{}} | {{}} | {{}} | {{}} | {{}} | {{}} |",
            partial(published_rows.sums, group),
        )
        for number, group in ((158, "rows"), (74, "rings"), (60, "even rings"), (84, "others"))
    ),
    (
        "docs/published.md",
        """Of {} pairs of rivals whose published figures differ by more than 3%, {} are predicted in
        order, {} as equal and {} reversed; the null model has {}, {} and {}.""",
        published_rows.order,
    ),
    (
        "docs/advise.md",
        "by less are in order in {} of {} cases, the others in {} of {}",
        published_rows.gaps,
    ),
    ("docs/advise.md", "at most {} for 64 ranks and {} for 4,096", answers),
    ("docs/compare.md", "slower or faster, in at most {}%.", alarms),
    (
        "docs/packed.md",
        "with the plan of both passes of a rank, takes {}",
        lambda: [packed_rows.plans()],
    ),
    ("docs/packed.md", "a process holds {}", lambda: [packed_rows.growth()]),
    ("docs/compare.md", "| 1% | 5% | {} | {} | {} |", lambda: slower_sweeps("1%")),
    (
        "docs/compare.md",
        "| half of the points 12%, half 1% | 10% | {} | {} | {} |",
        lambda: slower_sweeps("half 12%"),
    ),
    *(
        (PAPER, sentence, figures)
        for sentence, figures in (
            ("cores: {} at 16k tokens, {} over {}", tokens_per_second),
            (
                """vanilla attention {}, blockwise attention {} with a plain MLP, {} ({} times
                vanilla) with a blockwise one""",
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
    ),
)


@pytest.mark.parametrize(("name", "sentence", "figures"), FIGURES)
def test_a_page_says_what_its_record_holds(
    name: str, sentence: str, figures: Callable[[], list[str]]
) -> None:
    assert " ".join(sentence.split()).format(*figures()) in page(name)


@pytest.mark.parametrize("lines", [packed_rows.deals, packed_rows.pairs, packed_rows.charts])
def test_packed_documents_have_the_tables_of_their_records(lines: Callable[[], list[str]]) -> None:
    text = (ROOT / "docs" / "packed.md").read_text(encoding="utf-8").splitlines()
    assert not {*lines()} - {*text}


@pytest.mark.parametrize(
    "lines", [published_rows.ringed, published_rows.rated, published_rows.striped]
)
def test_published_runs_have_the_tables_of_their_records(lines: Callable[[], list[str]]) -> None:
    text = (ROOT / "docs" / "published.md").read_text(encoding="utf-8").splitlines()
    assert lines()
    assert not {*lines()} - {*text}
