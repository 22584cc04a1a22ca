"""Documents that a spec draws from a table of lengths: where the file is, and what it becomes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ringray.base.errors import SpecError
from ringray.lab.plan import plan
from ringray.lab.report import words
from ringray.lab.specs.model import Spec, json_schema, load, parse
from ringray.lab.trial.lengths import drawn

TABLE = "shortest,longest,documents\n1,10,4\n11,50,3\n"
ROWS = ((1, 10, 4), (11, 50, 3))
TEXT = """\
# Why?
# Because.
version: 1
name: packed
kind: latency
problem:
  seq_len: [64, 200]
  documents: @
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with a table; the working directory is another one."""
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "a.csv").write_text(TABLE)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def spec_of(folder: Path, documents: str, *changes: str) -> Spec:
    (folder / "s.yaml").write_text(TEXT.replace("@", documents))
    return load(folder / "s.yaml", changes)


def test_a_table_is_beside_the_spec(folder: Path) -> None:
    spec = spec_of(
        folder, "[null, 3, {lengths: a.csv}, {lengths: [60, 4]}, {lengths: a.csv, seed: 7}]"
    )
    *_, first, listed, second = spec.sweep("problem", "documents")
    assert (first.lengths, first.seed, listed.lengths) == (ROWS, 0, (60, 4))
    assert (second.lengths, second.seed) == (ROWS, 7)
    written = spec.canonical()["problem"]["documents"]
    assert written[3:] == [{"lengths": [60, 4]}, {"lengths": [[1, 10, 4], [11, 50, 3]], "seed": 7}]
    absolute = spec_of(folder, f"{{lengths: {folder}/a.csv}}")
    assert absolute.problem.documents == first
    relative = spec_of(folder, "null", "problem.documents={lengths: ../specs/a.csv, seed: 7}")
    assert relative.problem.documents == second


def test_without_a_file_it_is_in_the_working_directory(folder: Path) -> None:
    text = TEXT.replace("@", "{lengths: b.csv}")
    with pytest.raises(SpecError, match=r"b\.csv: no such file"):
        parse(text)
    Path("b.csv").write_text(TABLE)
    assert parse(text).problem.documents.lengths == ROWS  # type: ignore[union-attr]


def test_tables_of_the_examples_are_everywhere(folder: Path) -> None:
    spec = spec_of(folder, "{lengths: lengths/magi.csv}")
    assert len(spec.problem.documents.lengths) == 14  # type: ignore[union-attr, arg-type]
    assert load("experiments/packed.yaml").name == "packed"
    (folder / "lengths").mkdir()
    (folder / "lengths" / "magi.csv").write_text(TABLE)  # their own comes first
    assert spec_of(folder, "{lengths: lengths/magi.csv}").problem.documents.lengths == ROWS  # type: ignore[union-attr]


def test_the_text_tells_what_is_measured_without_the_file(folder: Path) -> None:
    spec = spec_of(folder, "[{lengths: a.csv}, {lengths: a.csv, seed: 1}]")
    (folder / "a.csv").unlink()
    assert spec.source.startswith("# Why?\n# Because.\nversion: 1\n")
    assert "- [11, 50, 3]\n" in spec.source
    assert spec.line_of("problem.documents") == 8
    again = parse(spec.source)
    assert again.digest == spec.digest
    assert again.source == spec.source
    assert parse(yaml.safe_dump(spec.canonical())).digest == spec.digest


def test_a_sweep_is_what_the_table_holds(folder: Path) -> None:
    digest = spec_of(folder, "{lengths: a.csv}").digest
    assert spec_of(folder, "{lengths: [[1, 10, 4], [11, 50, 3]], seed: 0}").digest == digest
    (folder / "b.csv").write_text(TABLE)
    assert spec_of(folder, "[{lengths: b.csv}]").digest == digest
    assert spec_of(folder, "{lengths: b.csv, seed: 1}").digest != digest
    (folder / "b.csv").write_text(TABLE.replace("3", "2"))
    assert spec_of(folder, "{lengths: b.csv}").digest != digest


def test_each_length_and_seed_has_its_documents(folder: Path) -> None:
    spec = spec_of(folder, "[{lengths: a.csv, seed: 1}, {lengths: a.csv, seed: 2}]")
    made = plan.build(spec, processes=2)
    assert {trial.config.problem.documents for trial in made.trials} == {
        drawn(ROWS, tokens, seed) for tokens in (64, 200) for seed in (1, 2)
    }
    assert len(made.runnable) == 4
    for trial in made.trials:
        problem = trial.config.problem
        assert problem.mask.boundaries[-1] == problem.seq_len


def test_batches_as_long_have_short_names_of_their_own() -> None:
    configs = {str(seed): {"documents": [seed, *range(1000)]} for seed in range(50)}
    names = words.names(configs, "alone").values()
    assert len(set(names)) == 50
    assert all(name.startswith("docs-1001:") and len(name) == 16 for name in names)
    assert words.value("documents", configs["0"]["documents"]) == "1001:a37cad"
    assert words.value("documents", tuple(configs["0"]["documents"])) == "1001:a37cad"


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ("{lengths: b.csv}", "documents.lengths: {0}/b.csv: no such file, expected a CSV file"),
        (
            "[{lengths: b.csv}, {lengths: c.csv}]",
            "documents: {0}/b.csv: no such file, expected a CS",
        ),
        (f"{{lengths: lengths/{'n' * 300}}}", "documents.lengths: file name too long"),
        ("{lengths: ''}", "documents.lengths: got '', expected a CSV file of a table, or"),
        ('{lengths: "a\\e.csv", seed: 1}', "got 'a\\x1b.csv', expected a CSV file of a table, or"),
        ("{lengths: .}", "documents.lengths: {0}: is a folder, expected a CSV file"),
        ("{lengths: https://h/a.csv}", "documents.lengths: {0}/https:/h/a.csv: no such file"),
        ("[2, {lengths: bad.csv}]", "documents: {0}/bad.csv: row 1: got '5,1,1', expected"),
        ("{lengths: a.csv, seed: -1}", "documents.seed: got -1, expected an integer from 0 to 214"),
        ("{lengths: a.csv, seed: 2147483648}", "documents.seed: got 2147483648, expected an int"),
        (
            "{lengths: a.csv, sed: 1}",
            "documents.sed: got 1, expected only the fields 'lengths' a",
        ),
        (
            "{seed: 1}",
            "documents.lengths: got nothing, expected a CSV file of a table, or its rows",
        ),
        ("{lengths: [[5, 1, 1]]}", "documents.lengths: got a list, expected a CSV file of a table"),
        ("{lengths: [[1, 5]]}", "documents.lengths: got a list, expected a CSV file of a table"),
        ("{lengths: [64], seed: 1}", "documents.lengths: got a list, expected a CSV file of a tab"),
        ("[{lengths: a.csv}, {lengths: a.csv, seed: 0}]", "documents: got a mapping, expected eac"),
        ("[{lengths: big.csv}, {lengths: big.csv, seed: 1}]", "documents: more than 8,192 rows in"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(folder: Path, documents: str, says: str) -> None:
    (folder / "bad.csv").write_text(TABLE.replace("1,10,4", "5,1,1"))
    (folder / "big.csv").write_text(TABLE + "1,1,1\n" * 5000)
    (folder / "lengths").mkdir()
    with pytest.raises(SpecError) as caught:
        spec_of(folder, documents)
    assert str(caught.value).startswith(f"{folder}/s.yaml:8: problem.")
    assert says.format(folder) in str(caught.value)
    assert "\n" not in str(caught.value)  # one mistake


def test_too_many_documents_are_refused_before_anything_starts(folder: Path) -> None:
    spec = spec_of(folder, "{lengths: [[1, 1, 1]], seed: 0}", "problem.seq_len=1M")
    with pytest.raises(SpecError, match=r"s.yaml:8: problem.documents: more than 65,536 documents"):
        plan.build(spec, processes=2)


def test_the_schema_has_both_forms() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    for documents, valid in [
        ("{lengths: a.csv, seed: 3}", True),
        ("{lengths: [[1, 2, 3]]}", True),
        ("{lengths: a.csv, seed: -3}", False),
        ("{lengths: [[1, 2]], seed: 0}", False),
    ]:
        assert validator.is_valid(yaml.safe_load(TEXT.replace("@", documents))) == valid
