"""What shows a sweep to people, as the process that follows the store needs it.

MLflow is :mod:`.mlflow_sink`. Another service is a :class:`Service`: a module ``NAME_sink`` that
imports quickly, and its name among those of ``tracking.to``; URIs ``NAME://...`` lead to it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, cast

from ringray.lab.store.feed import CurvePoint
from ringray.lab.trial.outcome import Kept, Tracked

if TYPE_CHECKING:
    from ringray.lab.store.store import Store


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


class Service(Protocol):
    """A module for a service other than MLflow."""

    def check(self) -> None:
        """Raises PlaceError if the service cannot be used from here; does not connect to it."""

    def page(self, experiment_id: str, run_id: str) -> str:
        """Returns the address of the sweep's page, or the command that shows it."""

    def open_sink(
        self, store: Store, digest: str, uri: str, experiment: str, settled: Tracked | None
    ) -> Sink:
        """Returns the sink of a sweep; arguments as those of ``MLflowSink``."""


def service_of(uri: str) -> Service | None:
    """Returns the service that a URI names; None if that is MLflow."""
    scheme = uri.partition("://")[0].lower()
    name = f"ringray.lab.tracking.{scheme}_sink"
    if not scheme.isidentifier() or scheme == "mlflow" or find_spec(name) is None:
        return None
    return cast("Service", importlib.import_module(name))
