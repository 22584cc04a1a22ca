"""Stores as commands and Python open them. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ringray.base import locks, private_files
from ringray.base.errors import UserError
from ringray.lab.cluster.job_folder import check_lasting
from ringray.lab.store.store import Store, default_path
from ringray.lab.trial.outcome import SweepRow


def open_store(named: str | None, create: bool = False, readonly: bool = False) -> Store:
    """Opens the named store or the default one.

    With ``readonly`` it changes nothing, neither the store nor the home folder.

    Raises:
        PlaceError: it cannot be used.
        UserError: the default store does not exist, and ``create`` is not set.
    """
    if not readonly:
        locks.remove_folders()
        if named is None:
            private_files.create_home()
    path = Path(named) if named else default_path()
    if named is None and not create and not path.exists():
        raise UserError(f"the store {path} is empty; `ringray run SPEC` fills it")
    check_lasting("the store", path)
    return Store(path, create, readonly)


def as_it_stands(store: Store, sweep: SweepRow) -> SweepRow:
    """Returns the sweep with the status interrupted if its driver was killed."""
    if sweep.status == "running" and store.owner(sweep.digest) is None:
        return replace(sweep, status="interrupted")
    return sweep
