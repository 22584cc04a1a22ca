"""Files that a user names for output: never a link, an input of the command or ringray's own."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringray.base import private_files
from ringray.base.errors import UserError
from ringray.base.output_files import is_stream
from ringray.lab.cli.options import Option, Output
from ringray.lab.cluster.job_folder import check_lasting

_ENDINGS = ("", *private_files.COMPANIONS, ".snapshot")  # of a database and its companions
_FOLDERS = ("tuned", "hardware", "logs", "artifacts", "running")  # in the home folder
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
) -> None:
    """Checks a file for output before anything is written to it; "-" is stdout.

    Args:
        arguments: every file that they name is an input; ``inputs``: further ones.
        folder, new: as in :class:`Output`.

    Raises:
        UserError: it is a link, an input or beside one, a file that ringray keeps, no file, or
            would not outlast the job that this process is.
    """
    path = Path(name)
    if name == "-":
        return
    for wrong in _objections(path, (*inputs, *_inputs(arguments)), folder):
        raise UserError(f"{option} {name}: {wrong}")
    if is_stream(path):
        return
    if new and path.is_file() and not arguments.force:
        raise UserError(f"{option} {name}: exists; {_WAY_OUT}, or give --force")
    if new and not path.parent.is_dir():
        raise UserError(f"{option} {name}: there is no folder {path.parent}; make it first")
    check_lasting(option, path)


def _objections(path: Path, inputs: Sequence[Path | None], folder: bool) -> Iterator[str]:
    stream = is_stream(path)
    if path.is_symlink() and not stream:
        yield f"is a link, to {path.readlink()}; {_WAY_OUT}"
    if path.is_dir() and not folder:
        yield "is a folder; name a file in it"
    if path.is_socket() or path.is_block_device():
        yield f"is no file; {_WAY_OUT}"
    if stream:
        return
    place, home = path.resolve(), private_files.home().resolve()
    for source in (*inputs, home / "store.db", home / "mlflow.db"):
        if source is not None and _is_of(place, source.resolve()):
            yield f"would replace {place}, which is an input or beside one; {_WAY_OUT}"
    if any(place.is_relative_to(home / name) for name in _FOLDERS):
        yield f"lies in {place.parent}, which ringray keeps; {_WAY_OUT}"


def _is_of(path: Path, database: Path) -> bool:
    """Tells whether a file is another one, perhaps a database, or one of its companions."""
    files = [database.with_name(database.name + ending) for ending in _ENDINGS]
    same = path.exists() and any(file.exists() and path.samefile(file) for file in files)
    near = path.parent == database.parent and path.name.startswith(f".{database.name}.")
    return same or near or path in files


def _inputs(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yields the files that arguments of a command name, or the spec that one of them names."""
    for name, value in vars(arguments).items():
        if name in (*getattr(arguments, "outputs", ()), "sweep", "sweeps"):
            continue
        texts = value if isinstance(value, list) else [value]
        yield from (file for text in texts if isinstance(text, str) for file in named_files(text))
        if name == "spec" and os.path.isfile(value):  # noqa: PTH113  it never raises
            yield from named_files(Path(value).read_text(encoding="utf-8", errors="replace"))


def named_files(text: str) -> Iterator[Path]:
    """Yields the files that exist by a name in ``text``, an argument or a spec."""
    bare = re.sub(r"(?m)(^|\s)#.*", "", text)  # no comments
    for word in (text, *re.findall(r"'[^']*'|\"[^\"]*\"|[^\s,'\"[\]{}]+", bare)):
        word = word.strip("'\"")
        for name in {word, word.rpartition(":")[0], *re.split("[:=]", word)}:
            if name and os.path.isfile(name):  # noqa: PTH113  it never raises
                yield Path(name)
