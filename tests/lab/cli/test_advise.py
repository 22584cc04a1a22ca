"""``ringray advise``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringray.lab import cli
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec

ASKED = ["advise", "8b", "--context", "256k", "--on", "h100:2x8"]


def test_answer_json_and_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, answer = tmp_path / "spec.yaml", tmp_path / "answer.json"
    assert cli.main([*ASKED, "--top", "2", "--spec", str(asked), "--json", str(answer)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(answer.read_text())
    assert len(found["proposals"]) == 2
    first = found["proposals"][0]
    assert first["step_s"] <= found["proposals"][1]["step_s"]
    assert sum(first["parts_s"].values()) == pytest.approx(first["step_s"])
    assert 0.3 < first["mfu"] < first["mfu_paper"]
    assert first["tokens_per_s"] == pytest.approx((4 << 20) / first["step_s"])
    for text in ("One rank: not enough", "Ring: ", first["transport"], first["limit"], "Memory"):
        assert text in printed
    built = plan.build(spec.load(asked), processes=2)
    (config, *_) = [trial.config for trial in built.runnable]
    assert config.ring.size == first["degrees"]["cp"]
    assert config.problem.seq_len == 256 << 10
    assert config.strategy.transport == first["transport"]
    assert config.problem.heads * first["degrees"]["tp"] == 32
    assert str(plan.build(spec.load(asked)).on).startswith("h100:")


def test_max_context(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["advise", "13b", "--max-context", "--on", "h100:8", "--json", "-"]
    assert cli.main(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_context"] > 200_000
    assert found["memory_bytes"]["total"] <= found["usable_bytes"]
    assert found["limit"] in found["memory_bytes"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["8b", "--context", "1M", "--on", "h10:8"], "did you mean 'h100'?"),
        (["8b", "--on", "h100:8"], "--context: expected the tokens"),
        (["8b", "--context", "1M", "--on", "h100:8", "--dtype", "fp8"], "--dtype: got 'fp8'"),
        (["8b", "--context", "100M", "--on", "h100:8"], "more than can be used"),
        (["8b", "--max-context", "--on", "h100:8", "--batch", "2"], "--batch: expected beside"),
        (["--layers", "2", "--context", "1M", "--on", "h100:8"], "--hidden"),
    ],
)
def test_wrong_questions_exit_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", *arguments]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert out == ""
