"""A small sweep that has been measured, to be shown."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ringray.lab.driver.events import (
    Note,
    Summary,
    SweepEnded,
    SweepStarted,
    TrialEnded,
    TrialStarted,
)
from ringray.lab.plan import plan
from ringray.lab.plan.trial import Trial
from ringray.lab.report.live import View
from ringray.lab.specs import model as spec
from ringray.lab.trial.outcome import Outcome, SweepInfo, TrialRow

INFO = SweepInfo("ab" * 32, "looks", "latency", {}, "", {})
TEXT = """\
version: 1
name: looks
kind: latency
problem: {seq_len: [2048, 8192], heads: 2, dtype: float32, direction: [forward, forward+backward]}
strategy: {partition: [contiguous, striped, zigzag, zigzag-token]}
"""


def planned(text: str = TEXT) -> plan.Plan:
    return plan.build(spec.parse(text))


def outcome(median: float = 12.34, **changes: Any) -> Outcome:
    metrics = {"median_ms": median, "p20_ms": median * 0.98, "p80_ms": median * 1.05}
    metrics |= {"baseline_ms": 13.0, "ratio": median / 13.0, "tflops": 0.161}
    metrics |= {"peak_memory_bytes": 4.0 * 2**20, "sent_bytes": 1.5 * 2**20}
    return Outcome(**{"status": "ok", "metrics": metrics, **changes})


def row(trial: Trial, ended: Outcome | None) -> TrialRow:
    return TrialRow(
        key=trial.key, index=trial.index, config=trial.config.as_dict(), predicted={},
        status=ended.status if ended else None, reason=ended.reason if ended else None,
        metrics=dict(ended.metrics) if ended else {}, samples={}, point=None, attempts=1,
        started=None, ended=None, environment=None,
    )  # fmt: skip


class Screen(io.StringIO):
    """A terminal with an encoding of its own."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


def console(
    width: int = 120, height: int = 40, terminal: bool = True, encoding: str = "utf-8"
) -> Console:
    return Console(
        file=Screen(encoding), record=True, width=width, height=height, force_terminal=terminal,
        color_system=None,
    )  # fmt: skip


def printed(renderable: Any, width: int = 120, encoding: str = "utf-8") -> str:
    to = console(width, encoding=encoding)
    to.print(renderable)
    return to.export_text()


def follow(view: View, made: plan.Plan, ended: int, done: dict[str, TrialRow]) -> None:
    view.take(SweepStarted(made, INFO, done))
    view.take(Note("starting 2 cpu actors"))
    for trial in made.trials:
        if trial.pruned is not None:
            view.take(TrialEnded(trial, Outcome("pruned", str(trial.pruned))))
    for trial in [one for one in made.runnable if one.key not in done][:ended]:
        view.take(TrialStarted(trial, 1))
        view.take(TrialEnded(trial, outcome()))
    view.take(SweepEnded(Summary(made.digest, made.spec.name)))
    view.close()
