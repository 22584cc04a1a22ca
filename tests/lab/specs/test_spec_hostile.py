"""Whatever the text, a spec or a SpecError comes of it, and nothing else happens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringray.base.errors import SpecError
from ringray.lab.specs.model import Spec, parse

if TYPE_CHECKING:
    from pathlib import Path

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
