"""A sweep that the store lost, taken back from MLflow: the side of whoever asks.

MLflow is imported by a process of its own (:mod:`ringray.lab.tracking.restore_process`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringray.base.errors import UserError
from ringray.lab.tracking.location import cannot_be_used
from ringray.lab.tracking.tracker import UNHURRIED_S, Prepared, checked, end

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Restored:
    """A sweep that MLflow has. ``added``: trials that the store lacked; ``unreadable``: runs there
    from which no trial can be rebuilt."""

    digest: str
    name: str
    added: int
    unreadable: int


def restore(store_path: Path, sweep: str, uri: str | None, timeout: float = 600.0) -> Restored:
    """Adds to the store what it lacks of a sweep (name, or the start of its digest) and MLflow has.

    Raises:
        PlaceError: MLflow cannot be used, or gave no answer.
        UserError: it has no such sweep, or several, or cannot rebuild it.
    """
    resolved = checked(uri, UNHURRIED_S)
    settings = {
        "store": str(store_path),
        "sweep": sweep,
        "uri": resolved,
        "request": int(UNHURRIED_S),
    }
    prepared = Prepared("restore", "ringray.lab.tracking.restore_process")
    process, channel = prepared.take()
    try:
        channel.send(settings)
        answer = channel.receive(timeout)
    finally:
        end(process, patience=2.0)
    if answer is None:
        raise cannot_be_used(resolved, f"it gave no answer (see {prepared.log_path})")
    if "error" in answer:
        raise UserError(answer["error"])
    return Restored(answer["digest"], answer["name"], answer["added"], answer["unreadable"])
