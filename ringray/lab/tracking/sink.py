"""A service that shows a sweep, as the process that follows the store needs it: MLflow, or Weights
& Biases for URIs ``wandb://...``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from ringray.lab.store.feed import CurvePoint
from ringray.lab.trial.outcome import Kept, Tracked


class Sink(Protocol):
    """A service to which one sweep is written.

    Any call may fail, and each may be repeated: nothing is ever there twice. After a failed call
    comes :meth:`refresh`.
    """

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


def service_of(uri: str) -> ModuleType | None:
    """Returns the module of Weights & Biases for its URIs; None if the service is MLflow."""
    if not uri.lower().startswith("wandb://"):
        return None
    return importlib.import_module("ringray.lab.tracking.wandb_sink")
