"""Files that a user names for output, which must not be ringray's own."""

from __future__ import annotations

from pathlib import Path

from ringray.base import private_files
from ringray.base.errors import UserError, reason_of
from ringray.lab.cluster.job_folder import check_lasting

_ENDINGS = ("", *private_files.COMPANIONS, ".snapshot")  # of a database and its companions
_FOLDERS = ("tuned", "hardware", "logs", "artifacts", "running")  # in the home folder
_LOOK = 4096  # bytes


def check_output(option: str, given: str, *databases: Path | None) -> None:
    """Checks a file for output before anything is written to it; links are followed.

    Args:
        databases: the sqlite files in use; those of the home folder are known.

    Raises:
        UserError: it is one of them or of their companions, another file that ringray keeps,
            holds something binary, or would not outlast the job that this process is.
    """
    path, home = Path(given).resolve(), private_files.home().resolve()
    check_lasting(option, path)
    used = [one.resolve() for one in databases if one is not None]
    for database in (*used, home / "store.db", home / "mlflow.db"):
        near = path.parent == database.parent
        if near and (
            path.name in [f"{database.name}{ending}" for ending in _ENDINGS]
            or path.name.startswith(f".{database.name}.")
        ):
            raise UserError(f"{option} {given}: is {path}, of the database {database}; {_WAY_OUT}")
    if any(path.is_relative_to(home / name) for name in _FOLDERS):
        raise UserError(f"{option} {given}: lies in {path.parent}, which ringray keeps; {_WAY_OUT}")
    if path.is_file():
        try:
            with private_files.regular(path) as file:
                binary = b"\0" in file.read(_LOOK)
        except OSError as error:
            raise UserError(f"{option} {given}: cannot be read: {reason_of(error)}") from error
        if binary:
            raise UserError(f"{option} {given}: holds something that is no text; {_WAY_OUT}")


def check_new(option: str, given: str, force: bool, *databases: Path | None) -> None:
    """Checks a file that is to be written whole, likewise; "-" is stdout.

    Raises:
        UserError: as above, or it exists and ``force`` is not set, or is in no folder.
    """
    if given == "-":
        return
    path = Path(given)
    check_output(option, given, *databases)
    if path.is_dir():
        raise UserError(f"{option} {given}: is a folder; name a file in it")
    if path.is_file() and not force:
        raise UserError(f"{option} {given}: exists; {_WAY_OUT}, or give --force")
    if not path.parent.is_dir():
        raise UserError(f"{option} {given}: there is no folder {path.parent}; make it first")


_WAY_OUT = "name another file"
