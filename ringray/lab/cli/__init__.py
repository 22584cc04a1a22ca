"""The command ``ringray``: ``entry`` for the shell, ``main`` for tests and other programs.

Each command is a function ``(arguments) -> exit code`` in a module of this package that is imported
when the command is given, so ``validate`` and ``plan`` answer at once. Errors of the user are one
message on stderr; exit codes are those of ``ringray --help``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from ringray import __version__
from ringray.base.errors import RingrayError, UserError, unknown
from ringray.base.redaction import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INTERRUPTED = 130

COMMANDS = {
    "validate": ("spec:validate", "check a spec, and say what is wrong where"),
    "plan": ("spec:plan", "list a spec's trials: predicted time, memory, traffic"),
    "run": ("run:run", "measure a spec's trials; continues what the store knows"),
    "tune": (
        "tuning:tune",
        "search for the best strategy or blocks, and keep them",
    ),
    "tuned": ("tuning:show", "list the tuned choices; export or import them"),
    "resume": ("run:resume", "continue a sweep; measures nothing twice"),
    "submit": (
        "jobs:submit",
        "run a spec as a job of a Ray cluster, and follow it",
    ),
    "stop": ("jobs:stop", "stop the job of a sweep, which can be submitted again"),
    "list": ("store:sweeps", "list the sweeps in the store"),
    "status": ("store:status", "show where a sweep stands, and its results"),
    "sync": ("store:sync", "write to MLflow what it lacks of a sweep"),
    "recover": ("store:recover", "save what can be read of a damaged store"),
    "doctor": (
        "doctor:doctor",
        "say what this machine can run, and what is missing",
    ),
    "schema": ("spec:schema", "print the JSON Schema of specs, for editors"),
}

_EPILOG = """\
exit codes:
  0    every trial ended as ok, oom or pruned
  1    some trial failed
  2    the spec, the command line or the place to run is wrong
  130  interrupted; `ringray resume` continues

environment:
  RINGRAY_HOME         where everything durable lies (default ~/.ringray)
  RAY_ADDRESS          the cluster to run on, where --address is not given
  RAY_AUTH_MODE=token  with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH: the cluster's token
  MLFLOW_TRACKING_URI  where results are shown, where the spec does not say
  NO_COLOR             no colours
"""


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code; never raises for what a user did."""
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
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("ringray"):
            _complain(
                f"ringray: error: {sys.executable} has no module {error.name}: it is not what "
                "ringray was installed for, or lacks some of its requirements"
            )
            return UserError.exit_code
        _complain(traceback.format_exc().rstrip())
        _complain(
            "ringray: error: this is a fault of ringray itself; please report it with the lines "
            "above, the spec and the output of `ringray doctor`; logs are in "
            f"{os.environ.get('RINGRAY_HOME') or '~/.ringray'}/logs"
        )
        return 1


def _dispatch(argv: Sequence[str]) -> int:
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UserError(unknown("command", argv[0], COMMANDS))
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    if arguments.command is None:
        parser.print_help()
        return 2
    module, _, name = COMMANDS[arguments.command][0].partition(":")
    handler: Callable[[argparse.Namespace], int] = getattr(
        importlib.import_module(f"{__name__}.{module}"), name
    )
    return handler(arguments)


def _parser() -> _Parser:
    parser = _Parser(
        prog="ringray",
        description="Which ring attention is fastest on this cluster, at these shapes?",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ringray {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    made = {
        name: commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:], allow_abbrev=False
        )
        for name, (_, summary) in COMMANDS.items()
    }
    for name in ("validate", "plan", "run", "tune", "submit"):
        made[name].add_argument("spec", metavar="SPEC", help="YAML file")
    for name in ("resume", "status", "sync"):
        made[name].add_argument("sweep", metavar="SWEEP", help="name, or the start of its digest")
    for name in ("run", "tune", "resume", "doctor"):
        made[name].add_argument(
            "--address", metavar="A", help="Ray cluster (default: RAY_ADDRESS, else local Ray)"
        )
    for name in ("run", "tune", "resume", "list", "status", "sync", "recover"):
        made[name].add_argument(
            "--store", metavar="F", help="store file (default: RINGRAY_HOME/store.db)"
        )
    for name in ("run", "tune", "resume"):
        made[name].add_argument(
            "--json", metavar="F", help="append a JSON line per trial to F; - is stdout"
        )
        made[name].add_argument(
            "--no-tracking", action="store_true", help="keep results in the store only, no MLflow"
        )
    made["resume"].add_argument(
        "--from-mlflow", action="store_true", help="first take what the store lacks from MLflow"
    )
    for name in ("submit", "stop"):
        made[name].add_argument(
            "--address", metavar="URL", help="dashboard of the head, as in http://HOST:8265"
        )
    made["stop"].add_argument(
        "sweep", metavar="SWEEP", help="name, the start of its digest, or its spec"
    )
    made["submit"].add_argument(
        "--detach", action="store_true", help="return when the cluster has it; do not follow"
    )
    made["submit"].add_argument(
        "--store", metavar="F", help="store file on the head (default: RINGRAY_HOME/store.db there)"
    )
    made["plan"].add_argument("--json", metavar="F", help="write JSON to F; - is stdout")
    moving = made["tuned"].add_mutually_exclusive_group()
    moving.add_argument("--export", metavar="F", help="write all of them to F")
    moving.add_argument("--import", metavar="F", dest="take", help="add those in F")
    for name in ("plan", "status"):
        made[name].add_argument("--all", action="store_true", help="show every trial")
    return parser


def _complain(text: str) -> None:
    """To stderr, after what stdout already said; a closed stderr is nobody's fault. Without
    secrets: it is about to be pasted into a report."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        print(shown(text), file=sys.stderr, flush=True)
