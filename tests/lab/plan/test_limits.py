"""A few lines may ask for more than anybody has time for; the plan refuses before it begins."""

from __future__ import annotations

import time

import pytest

from ringray.base.errors import SpecError
from ringray.lab.plan import limits
from ringray.lab.plan.plan import build
from ringray.lab.specs.model import parse

HEAD = "version: 1\nname: p\nkind: latency\n"


def numbers(count: int, first: int = 1) -> str:
    return f"[{', '.join(map(str, range(first, first + count)))}]"


@pytest.mark.parametrize(
    ("text", "line", "field", "says"),
    [
        (
            f"problem:\n  seq_len: {numbers(1000, 64)}\n  batch: {numbers(10)}\n",
            5, "problem.seq_len", "10,000 points, a plan has at most 2,000",
        ),
        (
            "problem: {seq_len: " + numbers(20, 64) + "}\nstrategy:\n  transport: auto\n"
            "  partition: auto\nring: {size: " + numbers(100) + "}\n",
            6, "strategy.transport", "more than 2,000 points",
        ),
        (
            "problem:\n  seq_len: 1M\n  batch: " + numbers(1000) + "\n  documents: 60000\n",
            7, "problem.documents", "too many documents, a plan has at most 20,000,000",
        ),
        (
            "ring: {size: 512}\nproblem:\n  seq_len: 1M\n  documents: 10000\n",
            7, "problem.documents", "too many lengths, ranks and documents to plan",
        ),
    ],
)  # fmt: skip
def test_what_is_too_much_is_refused_at_once(
    text: str, line: int, field: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_POINTS", 2000)
    head = HEAD.replace("latency", "strategy-tune") if "transport: auto" in text else HEAD
    spec = parse(head + text, "p.yaml")
    began = time.process_time()
    with pytest.raises(SpecError, match=says) as caught:
        build(spec)
    assert time.process_time() - began < 30
    assert (caught.value.line, caught.value.field) == (line, field)


def test_inputs_that_fit_nowhere_are_pruned() -> None:
    text = "problem: {seq_len: [64, 2147483647], batch: 65536, heads: 1024, head_dim: 256}\n"
    made = build(parse(HEAD + text))
    assert [trial.pruned is None for trial in made.trials] == [True, False]
    reason = made.trials[1].pruned
    assert reason is not None
    assert reason.field == "problem.seq_len"
    assert "TiB, more than 64" in reason.text
