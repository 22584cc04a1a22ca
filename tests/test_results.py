"""Records under experiments/results: linked, made by a command, and what pages say of them."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from experiments import record
from ringray.lab.predict import hardware

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "experiments" / "results"
CPU = "cpu-amd-epyc-2-cores"
PAPER = "experiments/paper/README.md"
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / PAPER]
MIB = 1 << 20


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def rows(name: str) -> list[Any]:
    text = (FOLDER / name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return list(json.loads(text)["rows"])


# What is linked, and what a record says of itself


def links() -> set[str]:
    found = set()
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]*results/[\w.-]+\.jsonl?)\)", path.read_text()):
            assert (path.parent / target).resolve().parent == FOLDER, (path, target)
            found.add(Path(target).name)
    return found


def test_records_are_linked_and_links_have_records() -> None:
    assert links() == {path.name for path in FOLDER.iterdir()}


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_a_record_says_how_and_where_it_was_made(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert "/tmp/" not in text
    assert "/home/" not in text
    if name.startswith("gpu-"):  # whose command is `make gpu`
        for line in gpu_lines(name):
            assert line["environment"]["device"].startswith("NVIDIA")
            assert line["environment"]["torch"]
            assert re.fullmatch(r"[0-9a-f]{40}", line["environment"]["commit"])
        return
    if name.endswith(".jsonl"):  # whose command is `ringray run` with the spec of its name
        spec = name.split(".")[-2]
        assert (ROOT / "experiments" / f"{spec}.yaml").exists()
        heads = [row["environment"] for row in rows(name)]
    else:
        heads = [json.loads(text)]
        (words,) = [head["command"].split() for head in heads]
        assert words[0] in ("python", "ringray")
        for word in words[1:]:
            assert "/" not in word or (ROOT / word).exists(), word
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", heads[0]["date"])
        assert rows(name)
    for head in heads:
        assert head["hardware"]["cpu"]
        assert head["versions"]["torch"]
        assert re.fullmatch(r"[0-9a-f]{40}", head["git"]["commit"])


def gpu_lines(name: str) -> list[dict[str, Any]]:
    """The lines of a kernel benchmark that have a case."""
    lines = [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]
    return [line for line in lines if "case" in line]


@pytest.mark.parametrize("page", ["README.md", "docs/kernels.md"])
def test_rates_on_a_gpu_are_those_of_the_records(page: str) -> None:
    rates: dict[tuple[str, str], float] = {}
    for name in ("gpu-h100.first_light.jsonl", "gpu-h100.specialised.jsonl"):
        for line in gpu_lines(name):
            if line["tflops"]:
                rates[line["case"], line["contender"]] = line["tflops"]
    contenders = ["ringray", "ringray-portable", "sdpa-cudnn", "flex", "sdpa-flash"]
    table: dict[str, list[float]] = {}
    for mask, direction in itertools.product(("causal", "full"), ("forward", "backward")):
        case = f"{direction}/{mask}/16k/d128/h16/bf16"
        every = {**rates, (case, "flex"): max(rates[case, x] for x in ("flex", "flex-tuned"))}
        table[f"{direction} {mask}"] = [round(every[case, name]) for name in contenders]
    text = (ROOT / page).read_text("utf-8")
    if page == "README.md":
        for direction in ("forward", "backward"):
            pairs = zip(table[f"{direction} causal"], table[f"{direction} full"], strict=True)
            cells = [f"{causal}, {full}" for causal, full in pairs]
            row = " | ".join(cells[:1] + cells[2:])
            assert row in text, row
    else:
        for name, cells in table.items():
            row = " | ".join(map(str, [name, *cells]))
            assert row in text, row


def share_of_the_table() -> list[str]:
    """Returns ringray's rates on an H100 over those of the table of hardware, full at 16k."""
    lines = {
        line["case"]: line["tflops"]
        for line in gpu_lines("gpu-h100.specialised.jsonl")
        if line["contender"] == "ringray"
    }
    curves = {
        one.direction: one.rates[16384] / 1e12
        for one in hardware.table()["h100"].attention
        if (one.head_dim, one.causal) == (128, False)
    }
    return [
        f"{lines[f'{way}/full/16k/d128/h16/bf16'] / curves[way]:.0%}"
        for way in ("forward", "backward")
    ]


def trial(status: str, error: float, **config: object) -> dict[str, Any]:
    metrics = {"error_out": error, "error_dq": 0.1, "median_ms": 7.0}
    return {"config": config, "status": status, "reason": None, "metrics": metrics}


def test_a_record_keeps_the_worst_of_measured_trials_and_what_differs() -> None:
    trials = [
        trial("ok", 0.25, dtype="a", size=1, same=0),
        trial("ok", 0.5, dtype="a", size=2, same=0),
        trial("pruned", 9.0, dtype="a", size=3, same=0),
        trial("ok", 0.75, dtype="b", size=1, same=0),
    ]
    assert record.rows(trials, ["dtype"], ["error_out"]) == [
        {"dtype": "a", "trials": 2, "status": "ok", "error_out": 0.5},
        {"dtype": "b", "trials": 1, "status": "ok", "error_out": 0.75},
    ]
    assert [row["size"] for row in record.rows(trials, [], [""])] == [1, 2, 3, 1]
    assert "same" not in record.rows(trials, [], [""])[0]


# What pages say: a sentence, and the figures of the record that stand in it


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


def published(group: str) -> list[str]:
    """Returns median error, 90th percentile and share that is too fast: predicted, then null."""
    lines = [
        re.findall(r"[\d.]+%", line)
        for line in rows("published.json")
        if re.match(rf" *\d+ {group} +(predicted|null model)", line)
    ]
    return [figure for median, _, ninth, fast in lines for figure in (median, ninth, fast)]


def pairs() -> list[str]:
    lines = [line for line in rows("published.json") if "pairs of rivals" in line]
    (every, *ours), (_, *null) = (re.findall(r"\d+", line) for line in lines)
    order = ([count[0], count[2], count[1]] for count in (ours, null))  # reversed ones last
    return [every, *(number for counts in order for number in counts)]


def alarms() -> list[str]:
    """Returns the largest share of comparisons of A with A that show a change, in percent."""
    shares = [re.search(r"alarms ([\d.]+)%", line) for line in rows("compare.answers.json")]
    return [f"{max(float(share[1]) for share in shares if share)}"]


def slower_sweeps(noise: str) -> list[str]:
    lines = [line for line in rows("compare.answers.json") if line.startswith(f"{noise}, ")]
    return [line.rpartition(" ")[2] for line in lines]


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
    (both,) = {f"{row['peak_memory_bytes'] / 2**20:.0f}" for row in lines if row["status"] == "ok"}
    (reason,) = (row["reason"] for row in lines if row["status"] == "pruned")
    return [both, re.findall("predicted ([0-9.]+) MiB", reason)[0]]


def trained_memory() -> list[str]:
    """Returns the MiB per rank with few trajectories and with many, and those predicted of one
    rank with many."""
    few, many = (
        max(row.get("peak_memory_bytes", 0) / 2**20 for row in rows(f"{CPU}.{name}.json"))
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


def figure(name: str, title: str) -> str:
    """The first number of the line that begins with a title."""
    (line,) = [line for line in rows(f"{CPU}.{name}.json") if line.startswith(f"{title} ")]
    return re.findall(r"[\d.,]+%?", line.removeprefix(title))[0]


def throttled(strategy: str, mbit: str) -> str:
    """Milliseconds of a strategy in the last problem."""
    lines = rows(f"{CPU}.throttled.json")
    first = lines.index(f"{mbit} Mbit/s, 3,072 tokens, 4 K/V heads, bfloat16, forward+backward")
    (line,) = [x for x in lines[first : first + 13] if x.startswith(f"  {strategy} ")]
    return f"{float(line.split()[2]):.0f}"


def over_links() -> list[str]:
    """Times of the best Ulysses and of the zigzag ring: on the slow link, on the faster one."""
    return [
        throttled("contiguous ulysses", "200"),
        throttled("zigzag ring", "200"),
        throttled("zigzag ring", "1,000"),
        throttled("striped ulysses", "1,000"),
    ]


def tokens_per_second() -> list[str]:
    (line,) = [line for line in rows(f"{CPU}.table4.json") if line.startswith("tiny")]
    ratio, alone, ring = re.findall(r"\d[\d.,]*\d", line.split("process")[1])
    return [ratio, ring, alone]


def ratio(name: str, cell: str) -> str:
    (line,) = [line for line in rows(f"paper.{name}.json") if line.startswith(f"{cell} ")]
    return str(line.removeprefix(cell).split()[2])


def within_two() -> list[str]:
    found = [
        float(line.removeprefix(match[0]).split()[2])
        for line in rows("paper.table3.json")
        if (match := re.match(r".*(vanilla|attention|MLP|ring)  ", line))
    ]
    near = sum(0.5 <= ratio <= 2 for ratio in found)
    return [str(near), str(len(found)), str(sum(ratio == 1 for ratio in found))]


def utilization() -> list[str]:
    lines = [line for line in rows("paper.table4.json") if "MFU: " in line]
    return [number for line in lines for number in re.findall(r"(\d+)%", line)]


def table_1() -> list[str]:
    cells = "ring, attention, 6bch", "memory-efficient, attention, 2bsh + 4bch"
    return [f"{float(ratio('table1', cell)):.2f}" for cell in cells]


FIGURES: tuple[tuple[str, str, Callable[[], list[str]]], ...] = (
    (
        "README.md",
        """all {} combinations are within the budget; the worst tensor uses {} of it in float32,
        {} in bfloat16 and {} in float16""",
        correctness,
    ),
    *(
        ("README.md", f"| {title} | {{}} ms | {{}} ms | {{}} | {{}} MiB | {{}} MiB |", figures)
        for title, figures in (
            ("float32 forward", lambda: sdpa("float32", "forward")),
            ("float32 forward + backward", lambda: sdpa("float32", "forward+backward")),
            ("bfloat16 forward", lambda: sdpa("bfloat16", "forward")),
            ("bfloat16 forward + backward", lambda: sdpa("bfloat16", "forward+backward")),
        )
    ),
    (
        "README.md",
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
        "README.md",
        """158 figures that others published: the median error is {}, where a null model that
        knows the rate of one device alone has {}; on rings {} against {}, and {} of them""",
        lambda: [*published("rows")[::3], *published("rings")[::3], published("rings")[2]],
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
    (
        "docs/prediction.md",
        "median error {}, 90th percentile {}; the choice is the fastest",
        lambda: [figure("throttled", name) for name in ("median error", "p90 error")],
    ),
    (
        "docs/prediction.md",
        """Ulysses at 200 Mbit/s ({} ms against {} ms of a zigzag ring), the zigzag ring at 1,000
        Mbit/s ({} ms against {} ms)""",
        over_links,
    ),
    (PAPER, "cores: {} at 16k tokens, {} over {}", tokens_per_second),
    *(
        ("docs/hardware.md", f"| {title} | {{}} | {{}} | {{}} | {{}} | {{}} | {{}} |", figures)
        for title, figures in (
            ("158 rows", lambda: published("rows")),
            ("74 rings", lambda: published("rings")),
            ("60 even rings", lambda: published("even rings")),
            ("84 others", lambda: published("others")),
        )
    ),
    (
        "docs/hardware.md",
        """of {} pairs of rivals whose published figures differ by more than 3%, it has {} in
        order, {} as equal and {} reversed; the null model has {}, {} and {}.""",
        pairs,
    ),
    ("docs/compare.md", "slower or faster, in at most {}%.", alarms),
    ("docs/compare.md", "| 1% | 5% | {} | {} | {} |", lambda: slower_sweeps("1%")),
    (
        "docs/compare.md",
        "| half of the points 12%, half 1% | 10% | {} | {} | {} |",
        lambda: slower_sweeps("half 12%"),
    ),
    (
        "docs/hardware.md",
        "ringray's own on another {} forward and {} backward (16k tokens, full;",
        share_of_the_table,
    ),
    (
        PAPER,
        """vanilla attention {}, blockwise attention {} with a plain MLP, {} ({} times vanilla)
        with a blockwise one""",
        on_one_rank,
    ),
    (PAPER, "| 1 | {} | 1 | | 2 | {} | {} | | 4 | {} | {} | | 8 | {} | {} |", on_rings),
    (
        PAPER,
        "| trained at 128, one rank | {}% | {}% | {}% | {}% |",
        lambda: retrieved(128),
    ),
    (
        PAPER,
        "| trained at 512, ring of 4 | {}% | {}% | {}% | {}% |",
        lambda: retrieved(512),
    ),
    (
        PAPER,
        "3,000 steps (rotary base 1,000), {} MiB of tensors per rank in both",
        lambda: ruled_out()[:1],
    ),
    (PAPER, "512 tokens on one rank are ruled out: {} MiB, limit 32.", lambda: ruled_out()[1:]),
    (PAPER, "table5_few.json)) | {}% | {}% |", lambda: trajectories("table5_few")),
    (PAPER, "table5.json)) | {}% | {}% |", lambda: trajectories("table5")),
    (PAPER, "| gain | | {} ± {} points (95%) |", gain),
    (
        PAPER,
        """{} MiB per rank on one rank with 4 trajectories (132 tokens) and {} MiB on each of four
        with 16 (528 tokens); 16 on one rank are ruled out: {} MiB predicted""",
        trained_memory,
    ),
    (PAPER, "{} of {} cells within a factor of two, {} equal", within_two),
    (
        PAPER,
        "a rank of the ring has 24bch, not 6bch ({}), and memory-efficient attention 2bsh ({})",
        table_1,
    ),
    (
        PAPER,
        """7B on 8 A100 at 256k {}%, {}%, {}%; 13B on 8 at 128k {}%, {}%, {}%; 13B on 32 at 2M
        {}%, {}%, {}%; 30B on 512 chips of TPU v4 at 2M {}%, {}%, {}%; 65B at 1M {}%, {}%,
        {}%.""",
        utilization,
    ),
)


@pytest.mark.parametrize(("name", "sentence", "figures"), FIGURES)
def test_a_page_says_what_its_record_holds(
    name: str, sentence: str, figures: Callable[[], list[str]]
) -> None:
    assert " ".join(sentence.split()).format(*figures()) in page(name)


def test_table_3_of_the_paper_is_that_of_its_record() -> None:
    lines = rows("paper.table3.json")
    for where, size, *cells in re.findall(
        r"^\| (.+), (\d+B) \| (.+) \| (.+) \| (.+) \| (.+) \|$", (ROOT / PAPER).read_text(), re.M
    ):
        found = []
        for line in lines:
            if line.startswith(f"{where}, {size}, "):
                printed, ours = re.findall(r"  +([\d.,]+)(?=  )", line)[:2]
                found.append("/".join(number.removesuffix(".00") for number in (printed, ours)))
        said = [re.sub(r"[* ]", "", cell) for cell in cells]
        assert said == [re.sub(r"\.0\b", "", pair) for pair in found], (where, size)


# What has no record says so


def test_what_was_trained_here_has_its_record() -> None:
    measured = (ROOT / PAPER).read_text().split("## Measured here")[1].split("\n## ")[0]
    parts = re.split(r"^\*\*(\w+ \d)\*\*", measured, flags=re.M)[1:]
    assert parts[::2] == ["Figure 1", "Figure 3", "Table 4", "Table 5"]
    assert all("[record](../results/" in text for text in parts[1::2])
