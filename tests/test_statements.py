"""Pages say what the code says: times, bytes and sizes in sentences; names of commands, options,
fields, metrics, variables, files and objects; links. CI runs what it is to run."""

from __future__ import annotations

import inspect
import os
import re
from functools import cache
from pathlib import Path

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
from ringray_kernels.bench.__main__ import parser as bench_parser
from tests.support.docs_blocks import PAGES, REPOSITORY, spans
from tests.support.records import page

# Options that pages name of programs of others.
FOREIGN = {"--app-name", "--allowed-hosts", "--build-arg", "--dashboard-host", "--num-cpus"}
FOREIGN |= {"--temp-dir", "--time"}


@pytest.mark.parametrize(
    ("name", "number"),
    [("ring", 2), ("bidirectional", 4), ("direct", 4), ("double-ring:2", 3), ("staged", 2)],
)
def test_a_transport_holds_as_many_chunks_as_its_page_says(name: str, number: int) -> None:
    layout, mask = Layout("zigzag", 1 << 12, 8), Mask(1 << 12, causal=False)
    routes = transport.plan(name, 8, 32, 8).routes
    walks = walk.choose(layout, mask, routes, "planned", walk.costs(2, 1, 32, 8, 128))
    held = occupancy.walked(walks.forward, layout.rows, backward=False).chunks.max()
    assert float(held) / layout.rows == number
    word = {2: "two", 3: "three", 4: "four"}[number]
    row = rf"\| `{name.partition(':')[0]}(:N)?`[^`]*\| {word} chunks \|"
    assert re.search(row, page("docs/transports.md"))


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
    assert " ".join(sentence.split()).format(*shown) in page(name)


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


def make_targets() -> set[str]:
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z]+):", text, flags=re.MULTILINE))


each_page = pytest.mark.parametrize("path", PAGES, ids=lambda x: str(x.relative_to(REPOSITORY)))


@each_page
def test_names_in_prose_exist(path: Path) -> None:
    valid = options() | FOREIGN
    types = {name: field.annotation for name, field in Spec.model_fields.items()}
    fields = {x: y for x, y in types.items() if isinstance(y, type) and issubclass(y, Fields)}
    for span in spans(path):
        program, _, rest = span.partition(" ")
        if program == "make" and re.match(r"[a-z]+$", rest):
            assert rest in make_targets(), span
        if program == "ringray" and re.match(r"[a-z]+\b", rest):
            words = rest.split()
            _, parser = cli._command(words[0])
            known_options = {
                option for action in parser._actions for option in action.option_strings
            }
            assert {word for word in words[1:] if word.startswith("--")} <= known_options, span
        if span.startswith("--"):
            assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", span)) <= valid, span
        if match := re.match(rf"({'|'.join(fields)})\.(\w+)", span):
            assert match[2] in fields[match[1]].model_fields, span
        for variable in re.findall(r"RINGRAY_\w+", span):
            assert re.search(rf"\b{variable}\b", source()), span


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@each_page
def test_no_link_is_broken(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if re.match(r"(https?|mailto):", link):
            continue
        target, _, anchor = link.partition("#")
        assert not target or (path.parent / target).exists(), f"{path}: {link}"
        whole = (path.parent / target) if target else path
        assert not anchor or anchor in anchors(whole), f"{path}: {link}"


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
    text = page("docs/models.md").partition("Options of `ring_attention`:")[2]
    options, last, _ = text.partition("`return_lse`")
    named = set(re.findall(r"`(\w+)`", options + last))
    taken = set(inspect.signature(ringray.ring_attention).parameters)
    assert named == taken - {"q", "k", "v", "group", "causal", "dropout_seed"}


def test_metrics_in_mlflow_are_those_of_the_table() -> None:
    text = (REPOSITORY / "docs" / "mlflow.md").read_text(encoding="utf-8")
    section = text.partition("**Metrics** of a child")[2].partition("Machine metrics are")[0]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`([\w/]+)`", row)
    }
    loads = of_group("load")
    assert named == {f"system/{name}" if name in loads else name for name in METRICS}


def test_ci_runs_every_check() -> None:
    script = REPOSITORY / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = script.read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in commands
    assert [c for c in commands if c.startswith("make ")] == [
        "make lint",
        "make test",
        "make QUICK=1 mutants",
        "make chaos",
        "make oldest",
    ]


def test_the_main_objects_of_the_design_exist() -> None:
    text = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("## Main objects")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| `(.*?)` \|", section, flags=re.MULTILINE)
    assert len(rows) > 20
    for names, place in rows:
        top = "kernels" if place.startswith("ringray_kernels") else "ringray"
        path = REPOSITORY / top / place
        files = [path] if path.suffix else sorted(path.rglob("*.py"))
        source = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`(\w+)`", names):
            where = rf"^(class {name}\b|{name}\b.* = )"
            assert re.search(where, source, re.MULTILINE), (place, name)
