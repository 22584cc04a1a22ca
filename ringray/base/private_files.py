"""Files and folders that their owner alone may read, whatever the umask says.

A folder that is there already is closed, if it is this user's; a file is made under a name that
nobody could know before, so that no link that waits there is followed, and takes its place whole or
not at all. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from ringray.base.errors import PlaceError

FOLDER, FILE = 0o700, 0o600
_OTHERS = 0o077


def home() -> Path:
    """Returns ``$RINGRAY_HOME`` or ``~/.ringray``, the folder of everything durable; it may not
    exist."""
    given = os.environ.get("RINGRAY_HOME")
    return Path(given).expanduser().absolute() if given else Path.home() / ".ringray"


def create_home() -> Path:
    """Creates :func:`home` for its owner only and returns it.

    Raises:
        PlaceError: it is not a directory, or cannot be created.
    """
    path = home()
    try:
        above(path / "any")
        if path == Path.home() / ".ringray":
            close(path)  # another folder may be shared on purpose
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise PlaceError(
            f"the home folder {path} cannot be used: {why}; "
            "set RINGRAY_HOME to a folder that you may write to"
        ) from error
    return path


def folder(path: Path) -> Path:
    """Make ``path`` and what is missing above it, and close it to others; returns it. OSError where
    that cannot be."""
    above(path / "any")
    close(path)
    return path


def above(path: Path) -> None:
    """Make what folders are missing above ``path``, closed to others; those that are there stay as
    they are. OSError where that cannot be."""
    folder, missing = path.parent, []
    while not folder.exists() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            one.mkdir(mode=FOLDER)
    path.parent.mkdir(exist_ok=True)  # says so where it is no folder


def close(path: Path) -> None:
    """Take all rights to ``path`` from others, if it is this user's and no link; never raises."""
    with contextlib.suppress(OSError):
        now = path.lstat()
        if now.st_uid == os.geteuid() and not stat.S_ISLNK(now.st_mode) and now.st_mode & _OTHERS:
            path.chmod(stat.S_IMODE(now.st_mode) & ~_OTHERS)


def create(path: Path) -> None:
    """An empty file at ``path``, or the one that is there, closed to others. OSError where that
    cannot be, as where ``path`` is a link."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, FILE))
    close(path)


def database(path: Path) -> None:
    """``create`` of a sqlite file that may be there, with the files that sqlite keeps beside it.
    OSError where that cannot be."""
    # One that is there is not opened: closing it would drop the locks of every connection that
    # this process has to it, and another process would then take the file for unused.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, FILE))
    for name in ("", "-wal", "-shm", "-journal"):
        one = path.resolve()
        close(one.with_name(one.name + name))


def write(path: Path, text: str) -> None:
    """Replace ``path`` by a file that holds ``text``, whole or not at all; its folder must exist.
    OSError where that cannot be."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(part, flags, FILE), "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
