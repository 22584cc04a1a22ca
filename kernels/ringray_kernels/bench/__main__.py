"""``python -m ringray_kernels.bench``: our kernels against every attention installed here.

``--compile-only`` describes the compiled kernels and needs no GPU; ``--quick`` and ``--all``
measure on one. docs/benchmarks.md explains the output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_MINUTES = {"quick": 4.5, "all": 25.0}


class _Usage(Exception):
    """A wrong command line or machine; the message has the expected one."""


class _BenchParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Usage(message)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = _BenchParser(
        prog="python -m ringray_kernels.bench", description=__doc__, allow_abbrev=False
    )
    what = made.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="the most important cases, five minutes")
    what.add_argument("--all", action="store_true", help="all cases, about twenty minutes")
    what.add_argument("--compile-only", action="store_true", help="compile without a run or a GPU")
    what.add_argument("--list", action="store_true", help="print all cases and contenders")
    made.add_argument("--json", type=Path, metavar="F", help="append JSON lines during the run")
    made.add_argument("--device", choices=("cuda", "cpu"), help="default cuda; cpu runs tiny sizes")
    made.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="only cases with TEXT in the name; repeatable",
    )
    made.add_argument("--contenders", metavar="A,B", help="only these, see --list")
    made.add_argument("--minutes", type=float, metavar="M", help="start no case after M minutes")
    made.add_argument(
        "--patience", type=float, default=120.0, metavar="S",
        help="end after S seconds without progress (120): a kernel hangs",
    )  # fmt: skip
    made.add_argument("--target", nargs="+", metavar="T", help="with --compile-only: sm_90, ...")
    made.add_argument(
        "--head-dim", nargs="+", type=int, metavar="D", help="with --compile-only: head dims"
    )
    return made


def _check_names(option: str, given: Iterable[str], known: Mapping[str, object]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise _Usage(f"{option}: got {', '.join(unknown)}, expected some of {', '.join(known)}")


def _compile_only(args: argparse.Namespace) -> int:
    from ringray_kernels.config import TARGETS

    _check_names("--target", args.target or (), TARGETS)
    wrong = [dim for dim in args.head_dim or () if not 1 <= dim <= 256]
    if wrong:
        raise _Usage(f"--head-dim: got {wrong[0]}, expected 1 to 256")
    # The interpreter compiles nothing.
    os.environ.pop("TRITON_INTERPRET", None)
    from ringray_kernels.inspect import report

    return report.main(args.target or report.TARGETS, args.head_dim or report.HEAD_DIMS, args.json)


def _names(given: str | None) -> list[str]:
    from ringray_kernels.bench.contenders import CONTENDERS

    names = list(CONTENDERS) if given is None else [name.strip() for name in given.split(",")]
    _check_names("--contenders", names, CONTENDERS)
    return names


def _device(name: str | None) -> torch.device:
    """Returns the device to measure on; called before triton is imported."""
    import torch

    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise _Usage(
            "no GPU here. --compile-only describes the compiled kernels without one; "
            "--device cpu runs the benchmark at tiny sizes"
        )
    # The interpreter does not use a GPU.
    os.environ.pop("TRITON_INTERPRET", None)
    return torch.device("cuda", torch.cuda.current_device())


def _wanted(only: Sequence[str] | None, *names: str) -> bool:
    return only is None or any(text in name for text in only for name in names)


def _measure(args: argparse.Namespace) -> int:
    which: Literal["quick", "all"] = "quick" if args.quick else "all"
    device = _device(args.device)
    from ringray_kernels.bench import problems, session

    names = _names(args.contenders)
    points = [p for p in problems.points(which, device.type) if _wanted(args.only, p.name)]
    rings = [
        ring
        for ring in problems.virtual_points(which, device.type)
        if "ringray" in names and _wanted(args.only, ring.name("forward"), ring.name("backward"))
    ]
    if not points and not rings:
        raise _Usage(f"--only: no case has {' or '.join(args.only)} in its name, see --list")
    minutes = _MINUTES[which] if args.minutes is None else args.minutes
    try:
        file = None if args.json is None else args.json.open("a", encoding="utf-8")
    except OSError as error:
        raise _Usage(f"--json: cannot write {args.json}: {error.strerror}") from None
    with file or contextlib.nullcontext():
        fine = session.BenchSession(device, names, file, minutes, args.patience).run(points, rings)
    return EXIT_OK if fine else EXIT_FAILED


def _list(args: argparse.Namespace) -> int:
    from ringray_kernels.bench import problems
    from ringray_kernels.bench.contenders import CONTENDERS

    print("contenders:", ", ".join(CONTENDERS))
    device = args.device or "cuda"
    quick = {point.name for point in problems.points("quick", device)}
    quick |= {ring.name("forward") for ring in problems.virtual_points("quick", device)}
    every = [point.name for point in problems.points("all", device)]
    every += [ring.name("forward") for ring in problems.virtual_points("all", device)]
    for name in every:
        print(f"{name}{'  (quick too)' if name in quick else ''}")
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit code.

    0: success; 1: one of our kernels is wrong or failed, or a figure was refused; 2: wrong command
    line or machine; 3: a kernel hung; 130: interrupted.
    """
    try:
        args = parser().parse_args(argv)
        if not args.compile_only and (args.target or args.head_dim):
            raise _Usage("--target and --head-dim go with --compile-only")
        if args.compile_only:
            return _compile_only(args)
        if args.list:
            return _list(args)
        if not (args.quick or args.all):
            raise _Usage("expected --quick, --all, --list or --compile-only")
        if args.minutes is not None and not args.minutes > 0:
            raise _Usage(f"--minutes: got {args.minutes:g}, expected more than 0")
        if not args.patience > 0:
            raise _Usage(f"--patience: got {args.patience:g}, expected more than 0")
        return _measure(args)
    except _Usage as error:
        print(f"ringray_kernels.bench: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
