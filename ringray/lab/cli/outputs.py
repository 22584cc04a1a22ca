"""Files that a user names for output: never a link, an input of the command or ringray's own."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringray.base import deadline, private_files
from ringray.base.errors import UserError, reason_of
from ringray.lab.cli.options import Option, Output
from ringray.lab.cluster.job_folder import check_lasting

_ENDINGS = ("", *private_files.COMPANIONS, ".snapshot")  # of a database and its companions
_FOLDERS = ("tuned", "hardware", "logs", "artifacts", "running")  # in the home folder
_LOOK = 4096  # bytes
_WRITABLE = (stat.S_IFREG, stat.S_IFIFO, stat.S_IFCHR)
_WAY_OUT = "name another file"


def check_outputs(options: Sequence[Option], arguments: argparse.Namespace) -> None:
    """Checks all outputs of a command before it starts; raises UserError."""
    outputs = [option for option in options if isinstance(option, Output)]
    arguments.outputs = [output.dest for output in outputs]
    for output in outputs:
        if (name := getattr(arguments, output.dest)) is not None:
            check_file(output.names[0], name, arguments, folder=output.folder, new=output.new)


def check_file(
    option: str,
    name: str,
    arguments: argparse.Namespace,
    *inputs: Path | None,
    folder: bool = False,
    new: bool = False,
    binary: bool = False,
) -> None:
    """Checks a file for output before anything is written to it; "-" is stdout.

    Args:
        arguments: every file that they name is an input; ``inputs``: further ones.
        folder, new: as in :class:`Output`; ``binary``: the present file need not be text.

    Raises:
        UserError: it is a link, an input or beside one, a file that ringray keeps, no file, holds
            something binary, or would not outlast the job that this process is.
    """
    if name == "-":
        return
    path = Path(name)
    stream = deadline.is_stream(path)
    wrong = _no_file(path, stream, folder)
    if wrong is None and not stream:
        wrong = _precious(path, (*inputs, *_inputs(arguments)))
        wrong = wrong or _in_the_way(path, new, binary, force=new and arguments.force)
    if wrong:
        raise UserError(f"{option} {name}: {wrong}")
    if not stream:
        check_lasting(option, path)


def _no_file(path: Path, stream: bool, folder: bool) -> str | None:
    if path.is_symlink() and not stream:
        return f"is a link, to {path.readlink()}; {_WAY_OUT}"
    kind = stat.S_IFMT(path.stat().st_mode) if path.exists() else stat.S_IFREG
    if kind in _WRITABLE or (folder and kind == stat.S_IFDIR):
        return None
    return "is a folder; name a file in it" if path.is_dir() else f"is no file; {_WAY_OUT}"


def _precious(path: Path, inputs: Sequence[Path | None]) -> str | None:
    place, home = path.resolve(), private_files.home().resolve()
    for source in (*inputs, home / "store.db", home / "mlflow.db"):
        if source is not None and _is_of(place, source.resolve()):
            return f"would replace {place}, which is an input or beside one; {_WAY_OUT}"
    if any(place.is_relative_to(home / name) for name in _FOLDERS):
        return f"lies in {place.parent}, which ringray keeps; {_WAY_OUT}"
    return None


def _in_the_way(path: Path, new: bool, binary: bool, force: bool) -> str | None:
    if not path.is_file():
        lacks = new and not path.parent.is_dir()
        return f"there is no folder {path.parent}; make it first" if lacks else None
    try:
        with private_files.regular(path) as file:
            holds_text = binary or b"\0" not in file.read(_LOOK)
    except OSError as error:
        return f"cannot be read: {reason_of(error)}"
    if not holds_text:
        return f"holds something that is no text; {_WAY_OUT}"
    return f"exists; {_WAY_OUT}, or give --force" if new and not force else None


def _is_of(path: Path, database: Path) -> bool:
    """Tells whether a file is another one, perhaps a database, or one of its companions."""
    files = [database.with_name(database.name + ending) for ending in _ENDINGS]
    same = path.exists() and any(file.exists() and path.samefile(file) for file in files)
    near = path.parent == database.parent and path.name.startswith(f".{database.name}.")
    return same or near or path in files


def _inputs(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yields the files that arguments of a command name: SPEC, FILE:SWEEP, FIELD=FILE."""
    for name, value in vars(arguments).items():
        if name in (*getattr(arguments, "outputs", ()), "sweep", "sweeps"):
            continue
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                names = text, text.rpartition(":")[0], text.partition("=")[2]
                yield from (Path(file) for file in names if os.path.isfile(file))  # noqa: PTH113
