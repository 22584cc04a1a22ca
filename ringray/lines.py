"""``--json``: one line per trial, appended as trials end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ringray.errors import UserError
from ringray.plan import cost_dict
from ringray.records import TrialRow, record_line

if TYPE_CHECKING:
    from pathlib import Path

    from ringray.plan import Trial
    from ringray.records import Outcome, SweepInfo


class Lines:
    """Appends to ``path``; without one, to nothing.

    Raises:
        UserError: ``path`` cannot be written.
    """

    def __init__(self, path: Path | None, sweep: SweepInfo) -> None:
        self._path, self._sweep = path, sweep
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise UserError(
                f"--json {path}: {error.strerror}; name a file that can be written"
            ) from None

    def append(self, trial: Trial, outcome: Outcome) -> None:
        """How ``trial`` ended."""
        if self._path is None:
            return
        row = TrialRow(
            trial.key, trial.index, trial.config.as_dict(), cost_dict(trial), outcome.status,
            outcome.reason, dict(outcome.metrics), dict(outcome.samples), outcome.point,
            outcome.attempts, outcome.started, outcome.ended, outcome.environment,
        )  # fmt: skip
        with self._path.open("a") as file:
            file.write(json.dumps(record_line(self._sweep, row)) + "\n")
