"""Completion scripts of shells, and the examples that ringray brings."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringray.lab import cli

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_name_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in cli.COMMANDS)


def test_examples_are_listed_with_what_they_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["examples"]) == 0
    out = capsys.readouterr().out
    for path in (ROOT / "experiments").glob("*.yaml"):
        (line,) = [one for one in out.splitlines() if one.startswith(f"{path.stem} ")]
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
