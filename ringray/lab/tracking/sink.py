"""What shows a sweep to people, as the process that follows the store needs it.

MLflow is :mod:`.mlflow_sink`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ringray.lab.store.progress import CurvePoint
from ringray.lab.trial.outcome import Kept, Tracked


class Sink(Protocol):
    """A service to which one sweep is written.

    Any call may fail, and each may be repeated: nothing is ever there twice. After a failed call
    comes :meth:`refresh`. Only :meth:`write` is called by several threads, with different trials.
    """

    writers: int
    """The number of trials that are written at a time."""
    place: Tracked

    def refresh(self) -> None:
        """Learns what the service holds, and opens the sweep's run the first time."""

    def write(self, recording: Kept) -> bool:
        """Writes a recording, and which one of its trial is current; returns False if there was
        nothing to write."""

    def lacks(self, recording: Kept) -> bool:
        """Returns whether the service had no complete copy of a recording at the last refresh."""

    def log_live(self, points: Sequence[CurvePoint]) -> None:
        """Adds points of curves of running trials."""

    def summarise(self) -> None:
        """Brings the counts, best figures and description of the sweep up to now."""

    def log_files(self) -> None:
        """Writes the spec, the plan and the results as files."""

    def close(self) -> None:
        """Marks the sweep as ended, as the store says."""

    def log_figures(self) -> None:
        """Writes what takes long to draw."""
