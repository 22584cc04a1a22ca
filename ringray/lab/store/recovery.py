"""``ringray recover``: a new store from what can be read of a damaged one, which is kept."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringray.base import private_files
from ringray.base.errors import PlaceError
from ringray.lab.store.lease import BEAT_S, Owner
from ringray.lab.store.salvage import salvage
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import UNKNOWN, SweepInfo

if TYPE_CHECKING:
    from pathlib import Path

    from ringray.lab.store.salvage import Salvaged

WATCH_S = 3 * BEAT_S


@dataclass(frozen=True)
class Saved:
    """One sweep. ``trials`` were saved, ``ended`` of which had ended; ``lost``: keys of trials
    that had ended and cannot be read; ``nameless``: of the sweep itself only the digest is left."""

    digest: str
    name: str
    trials: int
    ended: int
    lost: tuple[str, ...]
    nameless: bool


@dataclass(frozen=True)
class Recovered:
    """``kept``: where the damaged file is now; None where nothing was damaged, and nothing done."""

    kept: Path | None
    sweeps: tuple[Saved, ...]


def recover(path: Path) -> Recovered:
    """Puts a new store in the place of a damaged one, with all of it that can be read.

    Raises:
        PlaceError: there is no file, nothing in it can be read, a live process has it open, or
            the new one cannot be written; everything is as it was then.
    """
    path = path.expanduser().absolute()
    try:
        found = _at_rest(path)
    except OSError as error:
        raise PlaceError(
            f"the store {path} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from error
    new = path.with_name(f"{path.name}.recovering")
    try:
        if _whole(path, new):
            return Recovered(None, ())
    finally:
        _remove(new)
    if not found.sweeps and not found.trials:
        raise PlaceError(
            f"nothing in {path} can be read as rows of a ringray store; move it away. "
            "`ringray resume SWEEP --from-mlflow` rebuilds a sweep that MLflow has"
        )
    try:
        saved = _fill(new, found)
        kept = _exchange(path, new)
    except OSError as error:
        raise PlaceError(
            f"{new} cannot be written: {(error.strerror or str(error)).lower()}; {path} is as it "
            "was: free some space and try again"
        ) from error
    except PlaceError:
        _remove(new)
        raise
    return Recovered(kept, saved)


def _at_rest(path: Path) -> Salvaged:
    """What can be read of a store that nobody writes. Whoever ends while it is read moves rows from
    the log into the file: then it is read again."""
    while True:
        before = _state(path)
        found = salvage(path)
        holders = {Owner(*lease) for lease in found.leases}
        users = {holder for holder in holders if holder.near and holder.alive()}
        if any(not holder.near for holder in holders):  # of those elsewhere only the heart is heard
            time.sleep(WATCH_S)
            users |= {Owner(*lease) for lease in salvage(path).leases} - holders
        for holder in users:
            raise PlaceError(f"the store {path} is used by {holder}; end that process first")
        if _state(path) == before:
            return found


def _state(path: Path) -> list[tuple[int, int, int] | None]:
    """Of the file and its log: which it is, how long, and when it was written."""
    states: list[tuple[int, int, int] | None] = []
    for ending in ("", "-wal"):
        try:
            now = path.with_name(path.name + ending).stat()
        except FileNotFoundError:
            states.append(None)
        else:
            states.append((now.st_ino, now.st_size, now.st_mtime_ns))
    return states


def _whole(path: Path, copy: Path) -> bool:
    """Whether every row of it can be read as ever; on a copy, for sqlite mends what it can."""
    _remove(copy)
    try:
        for ending in ("", "-wal"):
            if (one := path.with_name(path.name + ending)).exists():
                private_files.create(target := copy.with_name(copy.name + ending))
                shutil.copyfile(one, target)
    except OSError as error:
        raise PlaceError(
            f"{copy} cannot be written: {(error.strerror or str(error)).lower()}; free some space"
        ) from error
    try:
        with Store(copy, create=False) as store:
            store.check()
            for sweep in store.sweeps():
                store.trials(sweep.digest)
    except PlaceError:
        return False
    return True


def _fill(new: Path, found: Salvaged) -> tuple[Saved, ...]:
    """Writes what was found, the sweeps that were begun last coming last."""
    saved = []
    digests = sorted(found.sweeps, key=lambda digest: found.sweeps[digest][1])
    digests += sorted(set(found.trials) - set(digests))
    with Store(new) as store:
        for digest in digests:
            trials = list(found.trials.get(digest, {}).values())
            nameless = digest not in found.sweeps
            if nameless:  # `ringray run SPEC` knows it by its digest and gives it its name again
                sweep, created = SweepInfo(digest, f"lost-{digest[:12]}", UNKNOWN, {}, "", {}), 0.0
            else:
                sweep, created = found.sweeps[digest]
            store.restore(sweep, created, trials)
            ended = sum(one.trial.status is not None for one in trials)
            lost = tuple(sorted(found.unreadable.get(digest, ())))
            saved.append(Saved(digest, sweep.name, len(trials), ended, lost, nameless))
    return tuple(saved)


def _exchange(path: Path, new: Path) -> Path:
    """``new`` takes the place of ``path``, which gets another name; the new name."""
    kept = path.with_name(f"{path.name}.damaged")
    number = 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.damaged-{number}")
    _keep(path, kept)
    log = path.with_name(f"{path.name}-wal")
    if log.exists():
        _keep(log, kept.with_name(f"{kept.name}-wal"))
    # A log of the old file beside the new one would be taken for its own.
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    new.replace(path)
    return kept


def _keep(path: Path, kept: Path) -> None:
    try:
        os.link(path, kept)
    except OSError:  # a filesystem without links
        shutil.copy2(path, kept)


def _remove(new: Path) -> None:
    for ending in ("", "-wal", "-shm"):
        with suppress(OSError):
            new.with_name(new.name + ending).unlink(missing_ok=True)
