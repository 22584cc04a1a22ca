"""Broken and hostile specs: line and field of each mistake, the way out, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringray.base.errors import SpecError
from ringray.lab.kinds import KINDS
from ringray.lab.specs.model import Spec, load, parse

GOOD = """\
version: 1
name: good
kind: latency
ring:
  size: 2
problem:
  seq_len: 64
  heads: 4
strategy:
  partition: zigzag
measure:
  repeats: 3
"""


# What stands in GOOD and what in its place; then line, field and the message.
CASES: dict[str, tuple[str, str, int, str | None, str]] = {
    # types and ranges
    "text for a number": (
        "heads: 4", "heads: eight", 8, "problem.heads",
        "got 'eight', expected an integer from 1 to 1024 or a list of them",
    ),
    "quoted number": ("heads: 4", 'heads: "4"', 8, "problem.heads", "; write it plainly"),
    "block of no kernel": (
        "partition: zigzag", "blocks: [null, dk=64x64/4/2]", 10, "strategy.blocks",
        "blocks: got 'dk=64x64/4/2', expected forward=..., dq=..., dkv=... once each",
    ),
    # names
    "unknown kind": (
        "kind: latency", "kind: latencey", 3, "kind",
        f"got 'latencey', expected one of {', '.join(KINDS)}; did you mean 'latency'?",
    ),
    "boolean for a name": (
        "name: good", "name: on", 2, "name", "got on (YAML reads it as true), expected a name"
    ),
    # fields
    "unknown field": (
        "seq_len: 64", "seq_len: 64\n  seq_length: 64", 8, "problem.seq_length",
        "unknown field; did you mean 'seq_len'? valid: seq_len, batch,",
    ),
    "field of another section": (
        "size: 2", "repeats: 2", 5, "ring.repeats", "did you mean 'measure.repeats'?"
    ),
    "missing field": ("seq_len: 64\n  ", "", 6, "problem.seq_len", "missing, expected"),
    "given twice": (
        "heads: 4", "heads: 4\n  heads: 8", 9, "problem.heads", "given twice, first on line 8"
    ),
    # sweeps
    "empty sweep": ("heads: 4", "heads: []", 8, "problem.heads", "got an empty list,"),
    "one of a sweep": (
        "heads: 4", "heads:\n    - 4\n    - four", 10, "problem.heads",
        "got 'four', expected an integer from 1 to 1024",
    ),
    "twice in a sweep": (
        "heads: 4", "heads: [4, 8, 4]", 8, "problem.heads", "got 4, expected each value once"
    ),
    # YAML itself
    "tab": ("  size: 2", "\tsize: 2", 5, None, "indent with spaces, not tabs"),
    "anchor": ("size: 2", "size: &s 2", 5, None, "'&s': anchors and aliases are not allowed"),
    "control character": ("name: good", "name: go\x07d", 2, None, "0x07 is not allowed"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_broken(case: str) -> None:
    old, new, line, field, says = CASES[case]
    assert GOOD.count(old) == 1
    with pytest.raises(SpecError) as caught:
        parse(GOOD.replace(old, new), "some/x.yaml")
    error = caught.value
    assert (error.line, error.field) == (line, field), str(error)
    assert says in error.message
    place = f"{error.field}: " if error.field else ""
    first = str(error).splitlines()[0]
    assert first == f"some/x.yaml:{line}: {place}{error.message}"
    assert error.exit_code == 2
    assert not re.search(r"pydantic|type=|Input should|Traceback|<class", str(error))
    assert max(len(part) for part in str(error).splitlines()) < 500
    str(error).encode()  # can be printed and stored


def test_all_mistakes_are_told_in_the_order_of_their_lines() -> None:
    text = GOOD.replace("repeats: 3", "repeats: x").replace("size: 2", "size: 0\n  size: 1")
    with pytest.raises(SpecError) as caught:
        parse(text.replace("zigzag", "zag"), "x.yaml")
    error = caught.value
    assert [(one.line, one.field) for one in error.errors] == [
        (5, "ring.size"),
        (6, "ring.size"),
        (11, "strategy.partition"),
        (13, "measure.repeats"),
    ]
    assert str(error).count("\n") == 3
    assert (error.line, error.field) == (5, "ring.size")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "\n\n"])
def test_empty(text: str) -> None:
    with pytest.raises(SpecError, match="empty, expected a mapping with the fields version, name"):
        parse(text)


class TestFiles:
    """Files that cannot be read."""

    def failure(self, path: Path | str) -> SpecError:
        with pytest.raises(SpecError) as caught:
            load(path)
        assert str(caught.value).startswith(str(path))
        return caught.value

    def test_missing(self, tmp_path: Path) -> None:
        (tmp_path / "quickstart.yaml").write_text(GOOD)
        error = self.failure(tmp_path / "quikstart.yaml")
        assert error.line is None
        assert error.message.startswith("no such file; did you mean")
        assert "quickstart.yaml" in error.message

    def test_examples_are_found_from_anywhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert load("experiments/quickstart.yaml").name == "quickstart"
        message = self.failure("experiments/quickstrat.yaml").message
        assert message == "no such file; did you mean 'experiments/quickstart.yaml'?"
        (tmp_path / "experiments").mkdir()
        (tmp_path / "experiments" / "quickstart.yaml").write_text(GOOD)  # their own comes first
        assert load("experiments/quickstart.yaml").name != "quickstart"

    def test_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "x.yaml"
        path.write_bytes(b"version: 1\nname: \xff\xfe\n")
        error = self.failure(path)
        assert error.line == 2
        assert "0xff is not UTF-8" in error.message


# Any text

LEAST = "version: 1\nname: least\nkind: latency\nproblem: {seq_len: 64}\n"

# Text that is nearly a spec: fragments that mean something to YAML or to a spec, in any order.
WORDS = """version: 1|name: a|kind: latency|problem:|seq_len: 64|heads|strategy|tracking|64k
measure: {baseline: |ring: {size: |documents: {lengths: [|: |:|- |[|]|{|}|,|'|"|>|? |8|-1|0x1F|1e9
.inf|.nan|1:30|2001-01-01|null|~|true|no|&a |*a|!!int |!x|!!python/name:os|<<|# c|---|...|%YAML 1.1
%TAG ! x|@|`|="""
OTHERS = ["\n", "\n  ", "\n    ", "|", "\t", "\x00", "\x85", "\ufeff", "\U0001f600", "\\"]
FRAGMENTS = st.sampled_from([*re.split(r"[|\n]", WORDS), *OTHERS, "\\u0000", "\\U99999999"])
ALMOST = st.lists(FRAGMENTS, max_size=30).map("".join)


def told(text: str) -> Spec | None:
    """The spec, or None if it was refused in the proper form."""
    try:
        return parse(text, "f.yaml")
    except SpecError as error:
        for line in str(error).splitlines():
            assert line.startswith("f.yaml:")
            assert "pydantic" not in line
        str(error).encode()
        return None


@given(ALMOST | st.text())
@settings(max_examples=200, deadline=None)
def test_any_text(text: str) -> None:
    told(text)


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"name: !!python/object/apply:os.system ['touch {mark}']"
    assert told(LEAST + text) is None
    assert not mark.exists()


@pytest.mark.parametrize("piece", ["[", "{a: ", "- ", "? ", "'", "&", "!", "|\n"])
def test_a_great_deal_of_one_thing(piece: str) -> None:
    assert told(piece * (50_000 // len(piece))) is None


@pytest.mark.parametrize("code", ["\\e[2J", "\\x9b1m", "\\u202e", "\\u2028", "\\x7f", "\\a", "\\n"])
@pytest.mark.parametrize("field", ["experiment", "uri"])
def test_no_field_holds_what_a_terminal_obeys(field: str, code: str) -> None:
    with pytest.raises(SpecError, match=rf"tracking\.{field}: got ") as caught:
        parse(f'{LEAST}tracking: {{{field}: "a{code}b"}}\n')
    assert str(caught.value).isprintable()
