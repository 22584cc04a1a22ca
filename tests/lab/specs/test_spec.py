"""Specs that are right: defaults, sweeps, one normal form, the digest; and fields from `--set`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ringray.base.errors import SpecError, UserError
from ringray.lab import cli
from ringray.lab.cluster import job_package
from ringray.lab.specs.model import Spec, json_schema, load, parse
from tests.support.job_server import URL, Server, ends
from tests.support.small_spec import SMALL

ROOT = Path(__file__).resolve().parents[3]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))  # folders hold other data
LEAST = "version: 1\nname: least\nkind: latency\nproblem: {seq_len: 64}\n"


def with_field(section: str, field: str, value: str) -> Spec:
    if section == "problem":
        return parse(LEAST.replace("seq_len: 64", f"seq_len: 64, {field}: {value}"))
    return parse(f"{LEAST}{section}: {{{field}: {value}}}\n")


def test_defaults_and_with_them_the_names_of_sweeps_stay() -> None:
    """A default that changes makes other sweeps of all specs that leave it out."""
    spec = parse(LEAST)
    assert spec.digest[:16] == "fca53beed19f91cc"
    canonical = spec.canonical()
    assert canonical["limits"] == {
        "trial_timeout": None, "retries": 2, "rank_memory": None, "place_timeout": 600.0,
        "gpu_hours": None,
    }  # fmt: skip
    assert canonical["tracking"] == {
        "to": "mlflow", "experiment": "least", "uri": None, "enabled": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "field", "value", "normal"),
    [
        ("problem", "heads", "4", 4),
        ("problem", "heads", "[8, 4]", (8, 4)),
        ("problem", "window", "[null, 0, 17]", (None, 0, 17)),
        ("problem", "causal", "[true, no]", (True, False)),
        ("problem", "dtype", "[fp32, bf16, float16]", ("float32", "bfloat16", "float16")),
        ("ring", "idle_release", "1.5 h", 5400.0),
        (
            "strategy",
            "blocks",
            "'dkv=64x64/4/2, forward=0128x64/8/2'",
            "forward=128x64/8/2,dkv=64x64/4/2",
        ),
        ("search", "objectives", "[ratio, median_ms]", ("ratio", "median_ms")),
        ("tracking", "experiment", "what it is: Ω", "what it is: Ω"),
        ("tracking", "experiment", "null", "least"),
    ],
)
def test_normal_form(section: str, field: str, value: str, normal: object) -> None:
    value = f"'{value}'" if ": " in value or "://" in value else value
    assert getattr(getattr(with_field(section, field, value), section), field) == normal


@pytest.mark.parametrize(
    ("text", "tokens"), [("1k", 1024), ("64k", 65536), ("64K", 65536), ("1M", 1 << 20)]
)
def test_lengths_in_k_and_m(text: str, tokens: int) -> None:
    spec = parse(LEAST.replace("64", text))
    assert spec.problem.seq_len == tokens
    assert spec.digest == parse(LEAST.replace("64", str(tokens))).digest


def test_documents_by_length() -> None:
    spec = with_field("problem", "documents", "[null, 2, {lengths: [60, 0, 4]}]")
    none, two, given = spec.sweep("problem", "documents")
    assert (none, two, given.lengths) == (None, 2, (60, 0, 4))
    assert hash(given)
    assert spec.canonical()["problem"]["documents"][2] == {"lengths": [60, 0, 4]}


def test_source_and_lines(tmp_path: Path) -> None:
    text = "# why\nversion: 1\nname: here\nkind: latency\nproblem:\n  seq_len:\n    - 64\n"
    path = tmp_path / "here.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    spec = load(str(path))
    assert spec.path == str(path)
    assert spec.source.splitlines() == text.splitlines()
    assert spec.line_of("problem") == 5
    assert spec.line_of("problem.seq_len") == 6
    assert spec.line_of("problem.heads") is None
    assert spec.line_of("nothing") is None
    assert parse(text).path == "<spec>"


class TestDigest:
    """The same measurements, however they are written."""

    base = "version: 1\nname: d\nkind: latency\nproblem:\n  seq_len: 64\n  heads: 4\n"

    @pytest.mark.parametrize(
        "text",
        [
            "# a comment\n" + base.replace("seq_len: 64", "seq_len: 64   # tokens"),
            "problem: {heads: 4, seq_len: 64}\nkind: 'latency'\nname: d\nversion: 1\n",
            base.replace("heads: 4", "heads: [4]"),
            base + "ring: {size: 2}\n",
            base + "ring: {idle_release: 1m}\n",
            base + "tracking: {experiment: other, enabled: false, uri: 'http://h:5000'}\n",
            base + "limits: {trial_timeout: 10m, retries: 0}\n",
            base + "cluster: h100:2x8\n",
            json.dumps(yaml.safe_load(base)),
        ],
    )
    def test_same(self, text: str) -> None:
        assert parse(text).digest == parse(self.base).digest

    def test_different(self) -> None:
        texts = [
            self.base.replace("name: d", "name: e"),
            self.base.replace("latency", "correctness"),
            self.base.replace("64", "65"),
            self.base.replace("heads: 4", "heads: [4, 8]"),
            self.base.replace("heads: 4", "heads: [8, 4]"),
            self.base + "  window: 0\n",
            self.base + "ring: {threads: 2}\n",
            self.base + "strategy: {partition: striped}\n",
            self.base + "measure: {repeats: 6}\n",
        ]
        digests = {parse(text).digest for text in [self.base, *texts]}
        assert len(digests) == len(texts) + 1

    def test_canonical_form_is_a_spec_with_the_same_digest(self) -> None:
        for path in EXPERIMENTS:
            spec = load(path)
            again = parse(yaml.safe_dump(spec.canonical()))
            assert again.canonical() == spec.canonical()
            assert again.digest == spec.digest


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_experiments(path: Path) -> None:
    spec = load(path)
    assert spec.name == path.stem
    assert spec.source.startswith("# "), "an experiment says which question it answers"


def test_schema_describes_every_field() -> None:
    schema = json_schema()
    assert schema["required"] == ["version", "name", "kind", "problem"]
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            described = field.get("description") or "$ref" in field
            assert described, f"{section['title']}.{name} has no docstring"
    heads = schema["$defs"]["Problem"]["properties"]["heads"]
    assert heads["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 1024}
    assert heads["anyOf"][1]["type"] == "array"
    partitions = schema["$defs"]["Strategy"]["properties"]["partition"]["anyOf"][0]["enum"]
    assert partitions == ["auto", "contiguous", "striped", "zigzag", "zigzag-token", "balanced"]


def test_schema_agrees_with_the_checks() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in EXPERIMENTS:
        validator.validate(yaml.safe_load(path.read_text()))
        validator.validate(load(path).canonical())
    for wrong in ("heads: eight", "heads: 0", "hedas: 4", "dtype: float8", "window: -1"):
        data = yaml.safe_load(LEAST.replace("seq_len: 64", f"seq_len: 64, {wrong}"))
        assert not validator.is_valid(data), wrong


# Fields that `--set` gives, in place of those of the file


@pytest.mark.parametrize(
    ("change", "section", "field", "value"),
    [
        ("problem.seq_len=64k", "problem", "seq_len", (65536,)),
        ("problem.seq_len=[1, 2k]", "problem", "seq_len", (1, 2048)),
        ("ring.size=4", "ring", "size", (4,)),  # the file has no such section
        ("problem.window=", "problem", "window", (None,)),
        ("problem.causal=true", "problem", "causal", (True,)),
        ("measure.baseline={name: sdpa, threads: 1}", "measure", "repeats", (2,)),
    ],
)
def test_a_field_gets_the_value_of_the_option(
    change: str, section: str, field: str, value: object
) -> None:
    changed = parse(SMALL, changes=[change])
    assert changed.sweep(section, field) == value
    assert changed.digest == parse(changed.source).digest
    assert changed.digest != parse(SMALL).digest or change == "problem.window="


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("problem.seqlen=1", "problem.seqlen: unknown field; did you mean 'seq_len'? valid"),
        ("problem.heads=two", "problem.heads: got 'two', expected an integer from 1 to 1024"),
        ("problem.heads=[", "problem.heads: not valid YAML: "),
        ("problem.heads=&a 2", "problem.heads: '&a': anchors and aliases are not allowed here"),
        ("problem=1", "problem: got 1, expected a mapping with the fields seq_len"),
    ],
)
def test_a_mistake_names_the_option_and_no_line(change: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(SMALL, "small.yaml", [change])
    assert str(caught.value).startswith(f"--set {change}: {says}")
    assert caught.value.line is None


@pytest.mark.parametrize("change", ["problem.heads", "=1", "problem.=1", "a." * 3000 + "a=1"])
def test_an_option_of_another_form_is_refused(change: str) -> None:
    with pytest.raises(UserError, match="expected FIELD=VALUE such as"):
        parse(SMALL, changes=[change])


def test_a_job_gets_the_resulting_spec(
    server: Server, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.logs = [[ends(server, "FAILED", 130)]]
    change = "problem.heads=[2, 4]"
    assert cli.main(["submit", small, "--address", URL, "--set", change]) == 130
    assert capsys.readouterr().out.endswith(
        f"ringray submit {small} --address {URL} --set 'problem.heads=[2, 4]'\n"
    )
    changed = load(small, [change])
    assert server.sent[0]["metadata"]["sweep"] == changed.digest
    with job_package.packed(changed) as shipment:
        assert load(shipment.folder / shipment.spec).digest == changed.digest
