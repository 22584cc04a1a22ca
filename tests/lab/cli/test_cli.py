"""The command line: what each command prints, where, with which exit code, and what it imports; in
surroundings that few users have too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringray.lab import cli
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec
from ringray.lab.store.store import default_path
from tests.support.small_spec import fill

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "experiments" / "quickstart.yaml")


# Exit codes and errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pln", QUICKSTART], "did you mean 'plan'?"),
        (["frobnicate"], "expected one of examples, validate, plan"),
        (["plan"], "SPEC"),
        (["plan", QUICKSTART, "--jsn", "x"], "unrecognized arguments: --jsn"),
        (["validate", "/nowhere/spec.yaml"], "/nowhere/spec.yaml"),
        (["plan", QUICKSTART, "--json", "/nowhere/plan.json"], "--json /nowhere/plan.json"),
        (["run", QUICKSTART, "--no-tracking", "--json", "/nowhere/a.jsonl"], "/nowhere/a.jsonl"),
        (["run", QUICKSTART, "--store", "/proc/store.db"], "/proc/store.db"),
        (["resume", "nothing"], "ringray run SPEC"),
    ],
)
def test_wrong_commands_exit_2_and_say_why(
    arguments: list[str], says: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("ringray: error: ")
    assert says in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"usage: ringray {name}" in capsys.readouterr().out


def test_an_unexpected_error_shows_where_and_how_to_report(
    small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> plan.Plan:
        raise ZeroDivisionError("deliberate")

    monkeypatch.setattr("ringray.lab.cli.spec.build", fail)
    assert cli.main(["plan", small]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: deliberate" in err
    assert "report it" in err.splitlines()[-1]


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ringray", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    _, err = process.communicate()
    assert (process.returncode, err) == (0, b"")


# validate, plan, schema


def test_plan_lists_trials_and_what_is_pruned(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", small]) == 0
    out = capsys.readouterr().out
    assert "ring of 2, device auto, 1 thread per rank, 64 tokens, 2 heads × 64, bfloat16" in out
    assert re.search(
        r"partition +causal +window +predicted +memory/rank +sent +FLOPs +balance", out
    )
    assert len(re.findall(r"^ *\d+ +(contiguous|zigzag) ", out, re.M)) == 6
    assert "2 points pruned: problem.window: got 3 without causal" in out


def test_plan_writes_json(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    assert cli.main(["plan", small, "--json", str(target)]) == 0
    assert "contiguous" in capsys.readouterr().out
    assert cli.main(["plan", small, "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(target.read_text())
    assert printed["sweep"] == plan.build(spec.load(small)).digest
    assert printed["totals"]["trials"] == 6
    assert [one["pruned"] is not None for one in printed["trials"]].count(True) == 2
    assert printed["trials"][0]["predicted"]["flops"] > 0


def test_the_quick_commands_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from ringray.lab import cli\n"
        f"assert cli.main(['validate', {QUICKSTART!r}]) == 0\n"
        "assert 'rich' not in sys.modules\n"
        f"assert cli.main(['plan', {QUICKSTART!r}]) == 0\n"
        "heavy = {'torch', 'ray', 'mlflow', 'triton', 'pandas', 'sqlalchemy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# list, status


def test_list_and_status_show_results_and_what_is_pending(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = fill(default_path())
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    # Its driver is gone and could not say so.
    assert re.search(
        rf"small +{made.digest[:12]} +latency +interrupted +2 ok · 2 pruned · 4 pending +20\d\d-",
        out,
    )
    assert cli.main(["status", made.digest[:8]]) == 0
    out = capsys.readouterr().out
    assert "2 ok · 2 pruned · 4 pending" in out
    assert re.search(r"contiguous .* ok +12\.3 +12\.1–12\.9 +13\.0 +0\.95 +0\.161 +4\.00", out)
    assert len(re.findall("pending", out)) == 5
    assert "`ringray resume small` continues" in out


def test_status_writes_the_records(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = fill(default_path())
    assert cli.main(["status", "small", "--json", "-"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["status"] for line in lines].count("ok") == 2
    assert {line["sweep"] for line in lines} == {made.digest}
    for _ in range(2):
        assert cli.main(["status", "small", "--json", str(home / "a.jsonl")]) == 0
    assert len((home / "a.jsonl").read_text().splitlines()) == 2 * len(lines)


# Surroundings


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``ringray LINE`` in a shell, which reads redirections."""
    return subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m ringray {line}"],
        capture_output=True, text=True, errors="surrogateescape", env=os.environ | variables,
    )  # fmt: skip


def check_one_line(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("ringray: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr


def test_a_terminal_without_our_characters(home: Path) -> None:
    fill(default_path())
    done = shell("status small", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    check_one_line(shell("status pröbe", PYTHONIOENCODING="ascii"), "small")


def test_a_full_stdout(home: Path) -> None:
    fill(default_path())
    says = "stdout, or a file cannot be used: no space left on device"
    check_one_line(shell("list >/dev/full"), says)


# Completion scripts of shells, and the examples that ringray brings


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_name_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in cli.COMMANDS)


def test_examples_are_listed_with_what_they_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["examples"]) == 0
    out = capsys.readouterr().out
    for path in (ROOT / "experiments").glob("*.yaml"):
        (line,) = [shown for shown in out.splitlines() if shown.startswith(f"{path.stem} ")]
        assert len(line.split()) > 3
    assert "Is the result right?" in out
    assert "kind:" not in out


def test_an_example_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert cli.main(["examples", "quickstart"]) == 0
    assert cli.main(["examples", "quickstart.yaml", "-o", "here"]) == 0
    text = (ROOT / "experiments" / "quickstart.yaml").read_text()
    for name in ("quickstart.yaml", "here/quickstart.yaml"):
        assert Path(name).read_text() == text
    Path("quickstart.yaml").write_text("mine")
    assert cli.main(["examples", "quickstart"]) == 2
    assert Path("quickstart.yaml").read_text() == "mine"
    assert cli.main(["examples", "quickstart", "--force"]) == 0
    assert Path("quickstart.yaml").read_text() == text
    capsys.readouterr()
    for arguments, says in [
        (["quikstart"], "did you mean 'quickstart'?"),
        (["../quickstart"], "example: got '../quickstart'"),
        (["quickstart", "-o", "nowhere"], "--output nowhere/quickstart.yaml"),
    ]:
        assert cli.main(["examples", *arguments]) == 2
        assert says in capsys.readouterr().err
