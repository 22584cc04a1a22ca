"""A service that shows a sweep, as the process that follows the store needs it.

MLflow is :mod:`.mlflow_sink`. Another service is a name of ``tracking.to`` and a module
``NAME_sink`` that imports quickly, to which URIs ``NAME://...`` lead. It has three functions:

    check()                       raises PlaceError if the service cannot be used from here
    page(experiment_id, run_id)   the address of a sweep's page, or the command that shows it
    open_sink(store, digest, uri, experiment, settled)   its Sink; arguments as of ``MLflowSink``
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
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
    """Returns the module of the service that a URI names; None if that is MLflow."""
    scheme = uri.partition("://")[0].lower()
    name = f"ringray.lab.tracking.{scheme}_sink"
    if not scheme.isidentifier() or scheme == "mlflow" or find_spec(name) is None:
        return None
    return importlib.import_module(name)
