"""Tables of the lengths of documents: what is read, what is refused, and what is drawn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ringray.base.errors import UserError
from ringray.lab.specs.yaml_source import EXAMPLES
from ringray.lab.trial.lengths import MOST_DOCUMENTS, checked, drawn, read

HEAD = "shortest,longest,documents\n"


def test_a_file_holds_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"\xef\xbb\xbf" + (HEAD + '1, 10,5\n\n"11",2147483647,0\n').encode())
    assert read(file) == read(str(file)) == ((1, 10, 5), (11, 2**31 - 1, 0))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "got the first line '', expected shortest,longest,documents"),
        ("1,10,5\n", "got the first line '1,10,5', expected shortest,longest,documents"),
        ("table,shortest,longest,documents\n", "got the first line 'table,shortest,longest,doc"),
        ("shortest,documents,longest\n1,1,9\n", "got the first line 'shortest,documents,longest'"),
        (HEAD, "no row has documents, expected at least one"),
        (HEAD + "1,10,0\n", "no row has documents, expected at least one"),
        (HEAD + "1,2,3\n1,ten,5\n", "row 2: got '1,ten,5', expected shortest,longest,documents wi"),
        (HEAD + "1,10\n", "row 1: got '1,10', expected"),
        (HEAD + "1,10,5,5\n", "row 1: got '1,10,5,5', expected"),
        (HEAD + "-1,10,5\n", "row 1: got '-1,10,5', expected"),
        (HEAD + "0,10,5\n", "row 1: got '0,10,5', expected"),
        (HEAD + "11,10,5\n", "row 1: got '11,10,5', expected"),
        (HEAD + "1,10,-5\n", "row 1: got '1,10,-5', expected"),
        (HEAD + "1,10,0.5\n", "row 1: got '1,10,0.5', expected"),
        (HEAD + "1,2147483648,5\n", "row 1: got '1,2147483648,5', expected"),
        (HEAD + "1,10,2147483648\n", "row 1: got '1,10,2147483648', expected"),
        (HEAD + "1,10,\x1b[2J\n", r"row 1: got '1,10,\x1b[2J', expected"),
        (HEAD + "1,10,5\n" * 20_000, "is larger than 128 KiB"),
        (HEAD + "9" * 140_000, "is larger than 128 KiB"),
        (b"\xff", "cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_another_file_is_refused(tmp_path: Path, text: str | bytes, says: str) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}: {says}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing.csv", "no such file, expected a CSV file"),
        (".", "is a folder, expected a CSV file"),
        ("n" * 4000, "cannot be read: file name too long"),
    ],
)
def test_no_file_is_refused(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read(tmp_path / name)


def test_documents_fill_the_tokens() -> None:
    table = checked([(3, 5, 1), (100, 200, 0)])
    for tokens in (1, 2, 99, 1000):
        lengths = drawn(table, tokens, 4)
        assert sum(lengths) == tokens
        assert set(lengths[:-1]) <= {3, 4, 5}
        assert 1 <= lengths[-1] <= 5
    assert set(lengths[:-1]) == {3, 4, 5}


def test_rows_are_drawn_by_weight_and_lengths_evenly() -> None:
    lengths = drawn(checked([(1, 4, 1), (5, 5, 0), (11, 14, 3)]), 200_000, 0)[:-1]
    counts = Counter(lengths)
    assert counts.keys() == {1, 2, 3, 4, 11, 12, 13, 14}
    for length, count in counts.items():
        assert count / len(lengths) == pytest.approx((3 if length > 10 else 1) / 16, rel=0.06)


def test_a_draw_is_the_same_everywhere() -> None:
    """Sweeps that were measured keep their trials only while these numbers stay."""
    table = read(EXAMPLES / "lengths" / "magi.csv")
    assert drawn(table, 4096, 0) == (1801, 278, 713, 1304)
    assert drawn(table, 4096, 2**31 - 1)[:5] == (446, 466, 437, 266, 390)
    assert drawn(table, 5000, 0)[:3] == drawn(table, 4096, 0)[:3]


@pytest.mark.parametrize(
    ("name", "rows", "most"), [("magi", 14, 196608), ("prolong512k", 19, 475862)]
)
def test_tables_that_are_shipped(name: str, rows: int, most: int) -> None:
    table = read(EXAMPLES / "lengths" / f"{name}.csv")
    assert len(table) == rows
    assert table[-1][1] == most
    assert sum(drawn(table, 524_288, 1)) == 524_288


def test_too_many_documents_are_refused() -> None:
    ones = checked([(1, 1, 1)])
    assert drawn(ones, MOST_DOCUMENTS, 0) == (1,) * MOST_DOCUMENTS
    with pytest.raises(UserError, match="more than 65,536 documents of this table fill 65,537"):
        drawn(ones, MOST_DOCUMENTS + 1, 0)
    with pytest.raises(UserError, match="more than 65,536"):
        drawn(ones, 2**31 - 1, 0)  # at once
