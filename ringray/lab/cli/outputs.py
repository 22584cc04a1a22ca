"""Files that a user names for output: never a link, nor an input of the command."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ringray.base import private_files
from ringray.base.errors import UserError
from ringray.base.output_files import is_stream
from ringray.lab.cli.options import Option, Output
from ringray.lab.cluster.job_folder import check_lasting


def check_outputs(options: Sequence[Option], arguments: argparse.Namespace) -> None:
    """Checks all outputs of a command before it starts; raises UserError."""
    outputs = [option for option in options if isinstance(option, Output)]
    arguments.outputs = [output.dest for output in outputs]
    places: dict[Path, str] = {}
    for output in outputs:
        if (name := getattr(arguments, output.dest)) is not None:
            option, place = output.names[0], Path(name).absolute()
            check_file(option, name, arguments, folder=output.folder, new=output.new)
            other = places.setdefault(place, option)
            if other != option and not is_stream(place):
                raise UserError(f"{option} {name}: is for {other}, too; name two files")


def check_file(
    option: str, name: str, arguments: argparse.Namespace, folder: bool = False, new: bool = False
) -> None:
    """Checks a file for output before anything is written to it; "-" is stdout.

    Args:
        arguments: every file that they name is an input, and so are ringray's databases.
        folder, new: as in :class:`Output`.

    Raises:
        UserError: it is a link, an input or no file, or would not outlast the job that this process
            is.
    """
    path = Path(name)
    if name == "-" or is_stream(path):
        return
    if path.is_symlink():
        raise UserError(f"{option} {name}: is a link; name another file")
    if path.is_dir() and not folder:
        raise UserError(f"{option} {name}: is a folder; name a file in it")
    if any(path.samefile(source) for source in _inputs(arguments) if path.exists()):
        raise UserError(f"{option} {name}: is an input; name another file")
    if new and path.is_file() and not arguments.force:
        raise UserError(f"{option} {name}: exists; name another file, or give --force")
    if new and not path.parent.is_dir():
        raise UserError(f"{option} {name}: there is no folder {path.parent}; make it first")
    check_lasting(option, path)


def _inputs(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yields the files that arguments of a command name, and those of ringray's databases."""
    paths = [private_files.home() / name for name in ("store.db", "mlflow.db")]
    for name, value in vars(arguments).items():
        if name not in (*getattr(arguments, "outputs", ()), "sweep", "sweeps"):
            for text in value if isinstance(value, list) else [value]:
                text = text[0] if isinstance(text, tuple) else text
                if isinstance(text, str):  # a file, a part of it or a number, a model's folder
                    paths += map(Path, (text, text.rpartition(":")[0], f"{text}/config.json"))
    for path in paths:
        with suppress(OSError, ValueError):
            if path.is_file():
                yield path
