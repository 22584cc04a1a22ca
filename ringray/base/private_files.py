"""Files and folders that only their owner may read, under any umask.

An existing folder of this user loses the rights of others. A file is written under an unpredictable
name, so that no prepared link is followed, and then replaces its target whole or not at all.
A function that cannot do its work raises OSError, but for ``close``. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from ringray.base.errors import ForeignFileError, PlaceError, reason_of

FOLDER, FILE = 0o700, 0o600
_OTHERS, WRITING = 0o077, 0o022  # rights of others: all, to write
COMPANIONS = ("-wal", "-shm", "-journal")  # endings of the files that sqlite keeps beside its own


def home() -> Path:
    """Returns ``$RINGRAY_HOME`` or ``~/.ringray``, the folder of everything durable; it may not
    exist.

    Raises:
        PlaceError: this user has no home folder, or the one named in RINGRAY_HOME has none.
    """
    named = os.environ.get("RINGRAY_HOME")
    try:
        return Path(named or "~/.ringray").expanduser().absolute()
    except RuntimeError:
        raise PlaceError(
            f"the home folder of user {os.getuid()} is not known; set RINGRAY_HOME to a folder "
            "that you may write to"
        ) from None


def create_home() -> Path:
    """Creates :func:`home` for its owner only and returns it.

    Raises:
        PlaceError: it is not a directory, or cannot be created.
    """
    path = home()
    try:
        above(path / "any")
        if str(path) == os.path.expanduser("~/.ringray"):  # noqa: PTH111  it never raises
            close(path)  # another folder may be shared on purpose
    except OSError as error:
        raise PlaceError(
            f"the home folder {path} cannot be used: {reason_of(error)}; "
            "set RINGRAY_HOME to a folder that you may write to"
        ) from error
    return path


def folder(path: Path) -> Path:
    """Creates ``path`` and its missing parents, closes it to others and returns it."""
    above(path / "any")
    close(path)
    return path


def above(path: Path) -> None:
    """Creates the missing folders above ``path``, closed to others; leaves existing ones as they
    are."""
    for folder in reversed(path.parents):
        folder.mkdir(mode=FOLDER, exist_ok=True)


def close(path: Path, rights: int = _OTHERS) -> None:
    """Takes the rights of others to ``path`` if it is this user's and not a link; never raises."""
    with contextlib.suppress(OSError):
        now = path.lstat()
        if now.st_uid == os.geteuid() and not stat.S_ISLNK(now.st_mode) and now.st_mode & rights:
            path.chmod(stat.S_IMODE(now.st_mode) & ~rights)


def refuse_foreign(path: Path) -> None:
    """Raises ForeignFileError if another user than this one and root may have made
    or may change ``path``, or if it is a link."""
    now = path.lstat()
    if stat.S_ISLNK(now.st_mode):
        raise ForeignFileError(f"{path} is a link: put there what it leads to")
    if now.st_uid not in (0, os.geteuid()):
        raise ForeignFileError(
            f"{path} belongs to user {now.st_uid}, expected {os.geteuid()} or root: copy it if you "
            "trust that user"
        )
    if now.st_mode & WRITING:
        raise ForeignFileError(f"other users may write to {path}: chmod -R go-w {path}")


def create(path: Path) -> None:
    """Creates an empty file at ``path`` or keeps the present one, and closes it to others."""
    made = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, FILE)
    try:
        _check_regular(made, path)
    finally:
        os.close(made)
    close(path)


def regular(path: Path) -> BufferedReader:
    """Opens a file for reading, and refuses at once a pipe or a device, which may never end."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check_regular(opened, path)
    except OSError:
        os.close(opened)
        raise
    return os.fdopen(opened, "rb")


def _check_regular(opened: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def database(path: Path) -> None:
    """Does ``create`` for a sqlite file and for the files that sqlite keeps beside it."""
    # An existing file is not opened: closing it would drop the locks of all connections of this
    # process to it, and another process would then take the file for unused.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, FILE))
    file = path.resolve()
    for ending in ("", *COMPANIONS):
        close(file.with_name(file.name + ending))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock that keeps other processes from writing ``path`` meanwhile."""
    lock = path.with_name(f".{path.name}.lock")
    above(lock)
    create(lock)
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, text: str) -> None:
    """Replaces ``path``, whole or not at all, by a file that holds ``text``."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(part, flags, FILE), "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
