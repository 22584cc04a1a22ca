"""Pages say what the code says: times, bytes and sizes in sentences; names of options, fields,
metrics, variables and files."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ringray
from ringray import transport
from ringray.lab import cli
from ringray.lab.cluster import access, connect, embedded, head_command
from ringray.lab.plan import limits
from ringray.lab.ring import group, monitor
from ringray.lab.ring.quarantine import Quarantine
from ringray.lab.specs import yaml_source
from ringray.lab.specs.fields import Fields
from ringray.lab.specs.model import Spec
from ringray.lab.tracking import tracker
from ringray.lab.trial.metrics import METRICS, of_group
from ringray.traffic import occupancy, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask
from ringray.traffic.walk import Walks
from ringray_kernels.bench.__main__ import parser as bench_parser
from tests.support.docs_blocks import PAGES, REPOSITORY, spans

if TYPE_CHECKING:
    from ringray.traffic.walk import Costs

BF16 = walk.costs(2, 1, 32, 8, 128)
# Options that pages name of programs of others.
FOREIGN = {"--app-name", "--allowed-hosts", "--build-arg", "--dashboard-host", "--num-cpus"}
FOREIGN |= {"--temp-dir", "--time"}


def text(name: str) -> str:
    return " ".join((REPOSITORY / name).read_text(encoding="utf-8").split())


# What strategies send and hold


def walks(partition: str, mask: Mask, ranks: int, name: str = "ring", costs: Costs = BF16) -> Walks:
    exchange = transport.plan(name, ranks, 32, 8)
    return walk.choose(
        Layout(partition, mask.seq_len, ranks), mask, exchange.routes, "planned", costs
    )


def rows(partition: str) -> int:
    sent = walks(partition, Mask(64), 4).forward.sent("forward")
    return int(sent.chunk_rows)


def chunks(name: str) -> float:
    layout = Layout("zigzag", 1 << 12, 8)
    moved = walks("zigzag", Mask(1 << 12, causal=False), 8, name).forward
    return float(occupancy.walked(moved, layout.rows, backward=False).chunks.max()) / layout.rows


@pytest.mark.parametrize(
    ("name", "number"), [("ring", 2), ("bidirectional", 4), ("double-ring:2", 3), ("staged", 2)]
)
def test_a_transport_holds_as_many_chunks_as_its_page_says(name: str, number: int) -> None:
    assert chunks(name) == number
    word = {2: "two", 3: "three", 4: "four"}[number]
    page = (REPOSITORY / "docs" / "transports.md").read_text(encoding="utf-8")
    row = rf"^\| `{name.partition(':')[0]}(:N)?`.*\| {word} chunks \|$"
    assert re.search(row, page, re.MULTILINE)


def test_causal_shares_are_those_of_the_table() -> None:
    whole = 4 * 3 * 16
    assert (rows("contiguous"), rows("zigzag")) == (whole / 2, whole * 3 / 4)
    page = text("docs/models.md")
    assert "| one block per rank | grows with the rank; sends half the rows |" in page
    assert "even; sends a quarter less |" in page


# Numbers in sentences

STATEMENTS = (
    ("docs/jobs.md", "It has {} s for that.", [head_command.STOP_WAIT_S]),
    (
        "docs/faults.md",
        """asks every {} s, so shorter trials are not asked at all. {} s without an answer is a
        stall""",
        [monitor.PULSE_S, monitor.STALL_S],
    ),
    (
        "docs/faults.md",
        """This takes at most {} s; a rank that does not answer is stalled. Process groups time out
        {} s later than the driver""",
        [monitor.STACKS_S, group.LATER_S],
    ),
    (
        "docs/faults.md",
        "after {} faults of the infrastructure with fewer than {} good trials between them",
        [Quarantine.STRIKES, Quarantine.CLEARS],
    ),
    (
        "docs/faults.md",
        "| {}, and {} per trial; {} with failures only |",
        [tracker.FINISH_S, tracker.PER_TRIAL_S, tracker.PATIENCE_S],
    ),
    (
        "docs/faults.md",
        "| {} to connect, {} for its first answer, {} to join it |",
        [connect.PROBE_S, access.CALL_S, connect.START_S],
    ),
    ("docs/faults.md", "| {} to start, in up to {} tries", [embedded.START_S, embedded.TRIES]),
    (
        "docs/security.md",
        "no tags, anchors or aliases; {} levels, {} MiB",
        [yaml_source.MAX_DEPTH, yaml_source.MAX_BYTES >> 20],
    ),
    ("docs/security.md", "at most {:,} points per plan", [limits.MOST_POINTS]),
)


@pytest.mark.parametrize(("name", "sentence", "numbers"), STATEMENTS)
def test_a_sentence_has_the_numbers_of_the_code(
    name: str, sentence: str, numbers: list[float]
) -> None:
    shown = [f"{number:g}" if isinstance(number, float) else number for number in numbers]
    assert " ".join(sentence.split()).format(*shown) in text(name)


# Names


@cache
def options() -> set[str]:
    """Every option of ringray's commands, of its benchmark, and of the scripts beside it."""
    parsers = [bench_parser(), *(cli._command(name)[1] for name in cli.COMMANDS)]
    actions = [action for one in parsers for action in one._actions]
    names = {option for action in actions for option in action.option_strings}
    for folder in ("cluster", "experiments", "docs/examples", "tests"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            names |= set(re.findall(r'"(--[a-z][\w-]*)"', path.read_text(encoding="utf-8")))
    return names


@cache
def source() -> str:
    paths = [
        path for top in ("ringray", "kernels", "tests") for path in (REPOSITORY / top).rglob("*.py")
    ]
    paths += (REPOSITORY / "cluster").glob("*.sh")
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path != Path(__file__))


def sections() -> dict[str, type[Fields]]:
    types = {name: field.annotation for name, field in Spec.model_fields.items()}
    return {
        name: one
        for name, one in types.items()
        if isinstance(one, type) and issubclass(one, Fields)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_names_in_prose_exist(page: Path) -> None:
    valid, fields = options() | FOREIGN, sections()
    for span in spans(page):
        if span.startswith("--"):
            assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", span)) <= valid, span
        if match := re.match(rf"({'|'.join(fields)})\.(\w+)", span):
            assert match[2] in fields[match[1]].model_fields, span
        for variable in re.findall(r"RINGRAY_\w+", span):
            assert re.search(rf"\b{variable}\b", source()), span


TOPS = "cluster|docs|experiments|kernels|ringray|tests"
FILE = re.compile(rf"(?<![\w./-])(?:{TOPS})/[\w./-]+\.(?:py|ya?ml|md|jsonl?|sh|ipynb)\b")
# Names that stand for several, what the site generates, and files of others.
ELSEWHERE = re.compile(r"HARDWARE|^docs/(reference|source)/")


@pytest.mark.parametrize("top", ["README.md", "CONTRIBUTING.md", "cluster", "docs", "experiments"])
def test_files_that_pages_and_comments_name_exist(top: str) -> None:
    place = REPOSITORY / top
    for path in [place] if place.is_file() else place.rglob("*"):
        if path.suffix in (".md", ".yaml", ".yml", ".sh", ".py") or path.name == "Dockerfile":
            for name in FILE.findall(path.read_text(encoding="utf-8")):
                assert ELSEWHERE.search(name) or (REPOSITORY / name).exists(), (path, name)


def test_page_names_every_option_of_the_op() -> None:
    page = text("docs/models.md").partition("Options of `ring_attention`:")[2]
    options, last, _ = page.partition("`return_lse`")
    named = set(re.findall(r"`(\w+)`", options + last))
    taken = set(inspect.signature(ringray.ring_attention).parameters)
    assert named == taken - {"q", "k", "v", "group", "causal", "dropout_seed"}


def test_metrics_in_mlflow_are_those_of_the_table() -> None:
    page = (REPOSITORY / "docs" / "mlflow.md").read_text(encoding="utf-8")
    section = page.partition("**Metrics** of a child")[2].partition("Machine metrics are")[0]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`([\w/]+)`", row)
    }
    loads = of_group("load")
    assert named == {f"system/{name}" if name in loads else name for name in METRICS}
