"""The command ``ringray``: ``entry`` for the shell, ``main`` for tests and other programs.

Each command is a function ``(arguments) -> exit code`` with its options declared beside it. Its
module is imported when the command is given, so ``validate`` and ``plan`` start fast. User errors
are one message on stderr; exit codes are those of ``ringray --help``.

options  how a command declares its options, and those that several share
spec     validate, plan, schema
run      run, resume, tune
tuning   tuned
store    list, status, sync, recover
report   report
jobs     submit, stop
watch    watch
outputs  files for output that are no links or inputs
advise   advise
calibrate  calibrate
doctor   doctor
links    doctor --cluster
verify   verify
compare  compare
examples   examples
completion  completion of commands in shells
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn, TextIO

from ringray import __version__
from ringray.base import deadline
from ringray.base.errors import RingrayError, UserError, reason_of, unknown
from ringray.base.redaction import shown
from ringray.base.signals import INTERRUPTED, Signals, install, quit_at_once
from ringray.lab.cli.options import Command
from ringray.lab.cli.outputs import check_outputs

# By purpose: the name of a command, its module and function, its summary.
GROUPS = {
    "write": {
        "examples": ("examples:examples", "list the specs that ringray brings, or copy one"),
        "validate": ("spec:validate", "check a spec, and report errors with line and field"),
        "plan": ("spec:plan", "list a spec's trials: predicted time, memory, traffic"),
        "schema": ("spec:schema", "print the JSON Schema of specs, for editors"),
        "completion": ("completion:completion", "print the completion script of a shell"),
    },
    "measure": {
        "run": ("run:run", "measure a spec's trials; skips those that the store has"),
        "resume": ("run:resume", "continue a sweep; measures nothing twice"),
        "tune": ("run:tune", "search for the best strategy or blocks, and keep them"),
        "verify": ("verify:verify", "tell whether a model on ranks computes what one process does"),
        "tuned": ("tuning:show", "list the tuned choices; export or import them"),
    },
    "look": {
        "list": ("store:sweeps", "list the sweeps in the store"),
        "status": ("store:status", "show the state of a sweep and its results"),
        "watch": ("watch:watch", "show a sweep while another process or a cluster runs it"),
        "report": ("report:report", "write what sweeps found as one page with figures"),
        "compare": ("compare:compare", "tell what is faster or slower beyond the noise"),
    },
    "cluster": {
        "doctor": ("doctor:doctor", "report what this machine can run, and what is missing"),
        "submit": ("jobs:submit", "run a spec as a job of a Ray cluster, and follow it"),
        "stop": ("jobs:stop", "stop the job of a sweep; it can be submitted again"),
        "calibrate": ("calibrate:calibrate", "measure this machine, for `plan --on local`"),
        "advise": ("advise:advise", "propose how to train a model with a long context"),
    },
    "repair": {
        "sync": ("store:sync", "write to MLflow the trials that it lacks of a sweep"),
        "recover": ("store:recover", "save the readable part of a damaged store"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

_USAGE = "ringray [-h] [--version] COMMAND ..."
_FIRST = """\
Finds the fastest ring attention for given shapes on a cluster.

first steps:
  ringray examples quickstart    copy a spec to begin with
  ringray run quickstart.yaml    measure its trials on this machine
  ringray report quickstart      write the results as a page with figures
"""
_EPILOG = """\
exit codes:
  0    every trial ended as ok, oom or pruned
  1    a trial failed
  2    the spec, the command line, the store or the cluster is wrong
  3    a local Ray did not start, or Ray has ended; the same again may succeed
  4    a limit of the spec stopped the sweep; `ringray resume` continues
  130  interrupted; `ringray resume` continues

environment:
  RINGRAY_HOME         folder of store, tuned choices and traces (default ~/.ringray)
  RAY_ADDRESS          the cluster to run on, unless --address is given
  RAY_AUTH_MODE=token  with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH: the cluster's token
  MLFLOW_TRACKING_URI  where results are shown, unless the spec says it
  NO_COLOR             switches colours off
"""


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def entry() -> NoReturn:
    """Runs the console script, which a signal ends with 130 until it has its exit code."""
    install(quit_at_once)  # there is nothing to put in order yet
    try:
        with Signals():
            for stream in (sys.stdout, sys.stderr):  # to print ? for characters that they lack
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
            code = main(sys.argv[1:])
            _flush(sys.stderr)
    except KeyboardInterrupt:
        code = INTERRUPTED
    install(signal.SIG_IGN)  # Python would put back the defaults of the system while it ends
    deadline.end(code)


def main(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code; never raises for a user's mistake."""
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except RingrayError as error:
        _complain(f"ringray: error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _complain("ringray: interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has ended
        _flush(sys.stdout)
        return 0
    except Exception as error:
        if Signals.arrived():  # in an import, which made another error of it
            _complain("ringray: interrupted")
            return INTERRUPTED
        if why := _outside(error):
            _complain(f"ringray: error: {why}")
            return UserError.exit_code
        _complain(traceback.format_exc().rstrip())
        _complain(
            "ringray: error: this is a bug in ringray; please report it with the lines "
            "above, the spec and the output of `ringray doctor`; logs are in "
            f"{os.environ.get('RINGRAY_HOME') or '~/.ringray'}/logs"
        )
        return 1


def _dispatch(argv: Sequence[str]) -> int:
    try:
        if argv and not argv[0].startswith("-"):
            command, parser = _command(argv[0])
            arguments = parser.parse_args(argv[1:])
        else:
            parser = _parser()
            parser.parse_args(argv)
            parser.print_help()
            return UserError.exit_code
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    check_outputs(getattr(command, "options", ()), arguments)
    return command(arguments)


def _command(name: str) -> tuple[Command, _Parser]:
    if name not in COMMANDS:
        raise UserError(unknown("command", name, COMMANDS))
    _, summary = COMMANDS[name]
    description = summary[0].upper() + summary[1:]
    parser = _Parser(prog=f"ringray {name}", description=description, allow_abbrev=False)
    return _declare(name, parser), parser


def _declare(name: str, parser: argparse.ArgumentParser) -> Command:
    """Adds the options of a command to its parser; returns the command."""
    module, _, function = COMMANDS[name][0].partition(":")
    command: Command = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    for option in getattr(command, "options", ()):
        parser.add_argument(*option.names, **option.settings)
    return command


def whole_parser() -> argparse.ArgumentParser:
    """Returns a parser of all commands with their options, for `completion`."""
    parser = _parser()
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        _declare(name, commands.add_parser(name, help=summary))
    return parser


def _parser() -> _Parser:
    lines = [_FIRST]
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<12}{summary}" for name, (_, summary) in group.items())]
    parser = _Parser(
        prog="ringray",
        usage=_USAGE,
        description="\n".join(lines),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ringray {__version__}")
    return parser


def _outside(error: Exception) -> str | None:
    """Returns what is wrong outside of ringray, None if nothing is."""
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("ringray"):
        return (
            f"{sys.executable} has no module {error.name}, which the command needs: "
            "pip install 'ringray[lab]' (in a checkout: make setup)"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'stdout, or a file'} cannot be used: {reason_of(error)}"
    return None


def _flush(stream: TextIO) -> None:
    """Writes what a stream holds; if that is impossible, leads the stream to nowhere: Python would
    report it again at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complain(text: str) -> None:
    """Prints to stderr, after all output to stdout, without secrets: the text is likely to become
    part of a report. A closed stderr is ignored."""
    _flush(sys.stdout)
    with contextlib.suppress(OSError):
        print(shown(text), file=sys.stderr, flush=True)
