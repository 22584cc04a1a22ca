"""``completion``: scripts with which shells complete commands and options."""

from __future__ import annotations

import argparse

from ringray.lab import cli
from ringray.lab.cli.options import Option, options

_SHELLS = ("bash", "zsh", "fish")
_FILES = ("SPEC", "F", "FILE", "A", "B")  # what an argument of these metavars may name
_FOLDERS = ("FOLDER", "DIR")


@options(Option("shell", choices=_SHELLS, help="the shell that reads the script"))
def completion(arguments: argparse.Namespace) -> int:
    """Prints the script of a shell."""
    import shtab

    parser = cli.whole_parser()
    for action in _actions(parser):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    actions = []
    for action in parser._actions:
        actions.append(action)
        if isinstance(action, argparse._SubParsersAction):
            actions += [inner for sub in action.choices.values() for inner in _actions(sub)]
    return actions
