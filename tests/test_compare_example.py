"""The workflow that compares pull requests: valid YAML, and commands with options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from ringray.lab import cli

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / "docs" / "examples" / "compare-on-github.yml"
COMMANDS = [
    line.replace('"venv-$side/bin/ringray"', "ringray").replace("venv-head/bin/ringray", "ringray")
    for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["compare"]["steps"]
    for line in step.get("run", "").replace("\\\n", " ").splitlines()
    if "bin/ringray" in line
]
DOCS = re.findall(r"^\$ (ringray .*)$", (ROOT / "docs" / "compare.md").read_text(), re.MULTILINE)


def test_the_workflow_has_what_runs_it() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow[True] == "pull_request"  # YAML 1.1 reads the key on as true
    assert workflow["permissions"] == {"contents": "read"}
    for step in workflow["jobs"]["compare"]["steps"]:
        assert ("uses" in step) != ("run" in step)
    assert len(COMMANDS) == 2


@pytest.mark.parametrize("line", [*COMMANDS, *DOCS])
def test_commands_are_ones_that_exist(line: str) -> None:
    _, name, *arguments = shlex.split(line.replace("$side", "base"))
    command, parser = cli._command(name)
    given = parser.parse_args(arguments)  # raises if it does not take them
    assert command.__name__ == name
    if name == "compare":
        assert given.fail_above == "5%"
