"""Every block of the documentation is checked: specs, Python, commands, and what they print.

A block that cannot be carries a comment with the reason: ``<!-- unchecked: ... -->``, or ``<!-- not
run: ... -->`` before Python that compiles, but needs a model or a GPU.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import ringray
from ringray.base.errors import UserError
from ringray.lab import cli
from ringray.lab.plan.plan import build
from ringray.lab.predict.hardware import read_entries
from ringray.lab.specs import model as specs
from tests.support.docs_blocks import PAGES, REPOSITORY, Block, blocks
from tests.support.place import Place
from tests.test_examples import RUN
from tests.test_statements import make_targets

BLOCKS = [block for page in PAGES for block in blocks(page)]
# Programs of others, and of the shell.
OTHERS = {
    "cd", "export", "gh", "git", "grafana", "ip", "mlflow", "pip", "prometheus", "ray", "scp",
    "source", "umask",
}  # fmt: skip
# Pages whose Python is run by tests.test_examples.
RAN = {
    "README.md",
    "docs/accelerate.md",
    "docs/huggingface.md",
    "docs/plugins.md",
    *(f"docs/{name}" for name, _ in RUN),
}
# Commands that take seconds, need neither a cluster nor a store, and print the same everywhere.
CHEAP = ("advise", "validate", "schema", "plan", "verify")


def of(*languages: str) -> list[Block]:
    return [one for one in BLOCKS if one.language in languages and one.mark != "unchecked"]


def parse(words: list[str]) -> None:
    """Fails for a command line that ringray refuses."""
    name, *rest = words
    if name.startswith("-"):
        assert name in ("--help", "--version")
        return
    cli._command(name)[1].parse_args(rest)


def own_specs(page: Path) -> list[str]:
    """The names of the specs that a page makes up."""
    found = [re.search(r"^name: (\S+)", one.text, re.MULTILINE) for one in blocks(page)]
    return [f"{one[1]}.yaml" for one in found if one]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_block_is_passed_over(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(list(blocks(page)))
    for block in blocks(page):
        if block.language not in ("python", "yaml") and block.mark != "unchecked":
            assert block.commands, f"{block}: no command; say with a comment why it is unchecked"


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_specs_and_hardware_are_valid(block: Block, tmp_path: Path) -> None:
    if block.text.startswith("version:"):
        assert build(specs.parse(block.text, str(block))).trials
    else:
        (tmp_path / "hardware.yaml").write_text(block.text)
        assert read_entries(tmp_path / "hardware.yaml")


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_compiles_and_is_run_or_says_why_not(block: Block) -> None:
    tree = ast.parse(block.text, str(block))
    ran = str(block.page.relative_to(REPOSITORY)) in RAN
    assert ran or block.mark == "not run", f"{block}: run it in tests/test_examples.py"
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        name = ast.unparse(call.func)
        if name.startswith("ringray.") and name.count(".") == 1:
            takes = inspect.signature(getattr(ringray, name.removeprefix("ringray.")))
            takes.bind_partial(**{word.arg: None for word in call.keywords if word.arg})


def check_ringray(words: list[str], page: Path) -> None:
    parse(words)
    for word in words[1:]:
        if word.endswith(".yaml") and not word.startswith("-"):
            assert (REPOSITORY / word).is_file() or word in own_specs(page), word


def check_make(words: list[str], page: Path) -> None:
    for target in (word for word in words if "=" not in word):
        assert target in make_targets(), target


def check_python(words: list[str], page: Path) -> None:
    """Fails where there is no such file or module, or it has no such option."""
    if words[0] == "-c":
        compile(words[1], str(page), "exec")
        return
    if words[:2] == ["-m", "ringray"]:
        check_ringray(words[2:], page)
        return
    if words[0] == "-m":
        found = importlib.util.find_spec(words[1])
        assert found is not None, words[1]
        assert found.origin is not None
        file, rest = Path(found.origin), words[2:]
        if (file.parent / "__main__.py").exists():
            file = file.parent / "__main__.py"
    else:
        at = next(n for n, word in enumerate(words) if word.endswith(".py"))
        file, rest = REPOSITORY / words[at], words[at + 1 :]
    source = file.read_text(encoding="utf-8")
    if "--" in rest:
        at = rest.index("--")
        check(rest[at + 1 :], page)
        rest = rest[:at]
    for option in (word for word in rest if word.startswith("--")):
        assert f'"{option}"' in source, f"{file.name}: {option}"


def check_sbatch(words: list[str], page: Path) -> None:
    script = next(word for word in words if not word.startswith("-"))
    assert (REPOSITORY / script).is_file(), script


CHECKS: dict[str, Callable[[list[str], Path], None]] = {
    "ringray": check_ringray,
    "make": check_make,
    "python": check_python,
    "torchrun": check_python,
    "sbatch": check_sbatch,
}


def check(words: list[str], page: Path) -> None:
    """Fails for a command that cannot be given as it is written."""
    program, rest = words[0], words[1:]
    if program in CHECKS:
        CHECKS[program](rest, page)
    else:
        assert program in OTHERS, f"no test knows the command {program!r}"
        if "--" in rest:
            check(rest[rest.index("--") + 1 :], page)


@pytest.mark.parametrize("block", of("console", ""), ids=str)
def test_commands_can_be_given_as_they_are_written(block: Block) -> None:
    for words, _ in block.commands:
        check(words, block.page)


def test_the_workflow_that_compares_gives_commands_that_exist() -> None:
    page = REPOSITORY / "docs" / "examples" / "compare-on-github.yml"
    workflow = yaml.safe_load(page.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    lines = [
        line
        for step in workflow["jobs"]["compare"]["steps"]
        for line in step.get("run", "").replace("\\\n", " ").splitlines()
        if "bin/ringray" in line
    ]
    assert len(lines) == 2
    for line in lines:
        parse(shlex.split(line.replace("$side", "base"))[1:])


def printed() -> list[Any]:
    """Commands that a test gives: those whose output a page shows are compared."""
    found = []
    for block in of("console", ""):
        for words, said in block.commands:
            given = words[0] == "ringray" and words[1] in CHEAP and "SPEC" not in words
            if given and not any("local" in word for word in words):  # calibrated first
                marks = [pytest.mark.exhaustive] if words[1] == "advise" else []
                if "--max-context" in words:
                    marks = [pytest.mark.slow]
                where = f"{block} {' '.join(words)}"
                found.append(pytest.param(words[1:], said, block.page, id=where, marks=marks))
    return found


@pytest.mark.parametrize(("words", "said", "page"), printed())
def test_commands_print_what_the_page_shows(
    words: list[str], said: list[str], page: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "experiments", tmp_path / "experiments")
    for block in blocks(page):
        if name := re.search(r"^name: (\S+)", block.text, re.MULTILINE):
            (tmp_path / f"{name[1]}.yaml").write_text(block.text)
        if name := re.match(r"# (\S+\.py)$", block.text, re.MULTILINE):
            (tmp_path / name[1]).write_text(block.text)
    here = words[0] == "plan" and "--on" not in words  # the output depends on this machine
    code = cli.main(words)
    out, err = capsys.readouterr()
    wrong = any(": WRONG" in line for line in said)
    assert code == (2 if any(line.startswith("ringray: error") for line in said) else wrong), err
    lines = iter([line.rstrip() for line in (out + err).splitlines()])
    for line in [] if here else filter(None, said):
        pattern = re.escape(line).replace(r"\.\.\.", ".*")
        there = line == "..." or any(re.fullmatch(pattern, text) for text in lines)
        assert there, f"not printed, or not there: {line}"


@pytest.mark.slow
def test_the_ten_minutes_lead_to_an_answer(place: Place) -> None:
    page = REPOSITORY / "docs" / "ten-minutes.md"
    given = [words for block in blocks(page) for words, _ in block.commands if words[0] != "cd"]
    assert len(given) <= 5
    (own,) = [block.text for block in blocks(page) if block.language == "yaml"]
    place.spec(own)
    for words in [words for words in given if words[0] == "ringray"]:
        done = place.run(*words[1:])
        assert done.code == 0, done.err
    for row in place.trials("own"):
        assert row.status == "ok", row.reason
    written = (place.home / "own.html").read_text(encoding="utf-8")
    lengths = specs.parse(own).sweep("problem", "seq_len")
    assert all(f"{length:,} tokens" in written for length in lengths)


def test_the_checks_notice_mistakes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ ringray status\n$ make nothing && frob\n```\n\n```\nabc\n```\n")
    first, second = blocks(page)
    assert [words for words, _ in first.commands] == [
        ["ringray", "status"], ["make", "nothing"], ["frob"]
    ]  # fmt: skip
    assert not second.commands
    with pytest.raises(UserError):
        parse(["status"])
    for words in (
        ["make", "nothing"], ["frob"], ["python", "none.py"], ["ringray", "plan", "none.yaml"],
        ["python", "-m", "ringray_kernels.bench", "--nothing"],
        ["ringray", "run", "SPEC", "--fast"],
    ):  # fmt: skip
        with pytest.raises((AssertionError, OSError, UserError)):
            check(words, page)
