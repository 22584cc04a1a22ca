"""Fields that `--set` gives, in place of those of the file."""

from __future__ import annotations

import pytest

from ringray.base.errors import SpecError, UserError
from ringray.lab import cli
from ringray.lab.cluster import job_package
from ringray.lab.specs import model as spec
from tests.support.job_server import URL, Server, ends
from tests.support.small_spec import SMALL


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
    changed = spec.parse(SMALL, changes=[change])
    assert changed.sweep(section, field) == value
    assert changed.digest == spec.parse(changed.source).digest
    assert changed.digest != spec.parse(SMALL).digest or change == "problem.window="


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
        spec.parse(SMALL, "small.yaml", [change])
    assert str(caught.value).startswith(f"--set {change}: {says}")
    assert caught.value.line is None


@pytest.mark.parametrize("change", ["problem.heads", "=1", "problem.=1", "a." * 3000 + "a=1"])
def test_an_option_of_another_form_is_refused(change: str) -> None:
    with pytest.raises(UserError, match="expected FIELD=VALUE such as"):
        spec.parse(SMALL, changes=[change])


def test_a_job_gets_the_resulting_spec(
    server: Server, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.logs = [[ends(server, "FAILED", 130)]]
    change = "problem.heads=[2, 4]"
    assert cli.main(["submit", small, "--address", URL, "--set", change]) == 130
    assert capsys.readouterr().out.endswith(
        f"ringray submit {small} --address {URL} --set 'problem.heads=[2, 4]'\n"
    )
    changed = spec.load(small, [change])
    assert server.sent[0]["metadata"]["sweep"] == changed.digest
    with job_package.packed(changed) as shipment:
        assert spec.load(shipment.folder / shipment.spec).digest == changed.digest
