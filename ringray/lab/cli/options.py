"""Options of commands: ``@options`` declares them beside the command; several share those here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringray.base import output_files
from ringray.base.errors import UserError, reason_of

Command = Callable[[argparse.Namespace], int]


class Option:
    """The arguments of ``ArgumentParser.add_argument``."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings


class Output(Option):
    """An option that names a file to write. ``folder``: a folder for files; ``new``: the file is
    only replaced with ``--force``. It is checked before the command starts."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.folder, self.new = settings.pop("folder", False), settings.pop("new", False)
        super().__init__(*names, **settings)
        self.dest = names[-1].removeprefix("--")


SPEC = Option("spec", metavar="SPEC", help="YAML file")
SWEEP = Option("sweep", metavar="SWEEP", help="name, or the start of its digest")
_SET_HELP = "another value for a field of the spec, as problem.seq_len=64k; repeatable"
SET = Option("--set", metavar="FIELD=VALUE", action="append", default=[], help=_SET_HELP)
_GCS_HELP = "a running Ray, by default port 6379 (default: RAY_ADDRESS, else a local Ray)"
ADDRESS = Option("--address", metavar="HOST:PORT", help=_GCS_HELP)
JSON = Output("--json", metavar="F", help="append a JSON line per trial to F; - is stdout")
_HEAD_HELP = "read the store on a cluster's head: http://HOST:8265"
ON_HEAD = Option("--address", metavar="URL", help=_HEAD_HELP)
DASHBOARD = Option("--address", metavar="URL", help="dashboard of the head, http://HOST:8265")
STORE = Option("--store", metavar="F", help="store file (default: RINGRAY_HOME/store.db)")
_FORCE_HELP = "measure also points that their prediction rules out"
FORCE = Option("--all", action="store_true", help=_FORCE_HELP)
_UNTRACKED = Option("--no-tracking", action="store_true", help="write to the store only, no MLflow")
MEASURING = (ADDRESS, STORE, JSON, FORCE, _UNTRACKED)
AGAIN = Option("--again", action="store_true", help="measure every trial once more")
ALL = Option("--all", action="store_true", help="show every trial")


def options(*declared: Option) -> Callable[[Command], Command]:
    """Declares the options of a command."""

    def declare(command: Command) -> Command:
        command.options = declared  # type: ignore[attr-defined]
        return command

    return declare


@contextmanager
def writing(path: str, option: str = "--json") -> Iterator[None]:
    """Turns an error of writing the file of an option into a UserError."""
    try:
        yield
    except OSError as error:
        advice = "name a file in a folder that you may write to, or - for stdout"
        why = f"cannot be written: {reason_of(error)}; {advice}"
        raise UserError(f"{option} {path}: {why}") from error


def write(option: str, path: str, text: str | bytes, flag: int = os.O_TRUNC) -> None:
    """Writes to a new file, or to stdout; raises UserError if it cannot be written."""
    data = text.encode() if isinstance(text, str) else text
    if path == "-":
        print(data.decode(), end="", flush=True)
        return
    with writing(path, option), os.fdopen(output_files.opened(Path(path), flag), "wb") as file:
        file.write(data)


def append(path: str, lines: str) -> None:
    """Does the same, but appends to the file of ``--json``."""
    write("--json", path, lines, os.O_APPEND)
