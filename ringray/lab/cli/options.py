"""Options of commands: ``@options`` declares them beside the command; several share those here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    Command = Callable[[argparse.Namespace], int]


class Option:
    """The arguments of ``ArgumentParser.add_argument``."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings


SPEC = Option("spec", metavar="SPEC", help="YAML file")
SWEEP = Option("sweep", metavar="SWEEP", help="name, or the start of its digest")
ADDRESS = Option(
    "--address", metavar="A", help="Ray cluster (default: RAY_ADDRESS, else local Ray)"
)
DASHBOARD = Option("--address", metavar="URL", help="dashboard of the head, as in http://HOST:8265")
STORE = Option("--store", metavar="F", help="store file (default: RINGRAY_HOME/store.db)")
JSON = Option("--json", metavar="F", help="append a JSON line per trial to F; - is stdout")
NO_TRACKING = Option(
    "--no-tracking", action="store_true", help="keep results in the store only, no MLflow"
)
ALL = Option("--all", action="store_true", help="show every trial")


def options(*given: Option | tuple[Option, ...]) -> Callable[[Command], Command]:
    """Declares the options of a command; those in a tuple exclude each other."""

    def declare(command: Command) -> Command:
        command.options = given  # type: ignore[attr-defined]
        return command

    return declare


def add(parser: argparse.ArgumentParser, command: Command) -> None:
    """Adds the options that ``command`` declares."""
    for one in getattr(command, "options", ()):
        alternatives = one if isinstance(one, tuple) else (one,)
        group = parser.add_mutually_exclusive_group() if isinstance(one, tuple) else parser
        for option in alternatives:
            group.add_argument(*option.names, **option.settings)
