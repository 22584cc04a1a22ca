"""``python -m ringray_kernels.bench``: our kernels against every attention installed here.

``--compile-only`` describes the compiled kernels and needs no GPU; ``--first-light``, ``--quick``
and ``--all`` measure on one. docs/benchmarks.md explains the output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ringray_kernels.bench.watchdog import EXIT_HUNG, EXIT_USAGE, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
_MINUTES = {"quick": 4.5, "all": 25.0, "first_light": 530 / 60}


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
    light = "a new GPU: correctness, speed; nine minutes"
    what.add_argument("--first-light", action="store_true", help=light)
    what.add_argument("--stage", metavar="NAME", help="one stage of --first-light alone")
    what.add_argument("--compile-only", action="store_true", help="compile without a run or a GPU")
    what.add_argument("--list", action="store_true", help="print all cases and contenders")
    file = made.add_mutually_exclusive_group()
    file.add_argument("--json", type=Path, metavar="F", help="append JSON lines during the run")
    resume = "as --json, skips what F has, survives a hang"
    file.add_argument("--resume", type=Path, metavar="F", help=resume)
    made.add_argument("--device", choices=("cuda", "cpu"), help="default cuda; cpu runs tiny sizes")
    only = "only cases with TEXT in the name; repeatable"
    made.add_argument("--only", action="append", metavar="TEXT", help=only)
    made.add_argument("--contenders", metavar="A,B", help="only these, see --list")
    made.add_argument("--minutes", type=float, metavar="M", help="start no case after M minutes")
    patience = "end after S seconds without progress (120): a kernel hangs"
    made.add_argument("--patience", type=float, metavar="S", help=patience)
    made.add_argument("--target", nargs="+", metavar="T", help="with --compile-only: sm_90, ...")
    head_dims = "with --compile-only: head dims"
    made.add_argument("--head-dim", nargs="+", type=int, metavar="D", help=head_dims)
    return made


def _check_names(option: str, names: Iterable[str], valid: Mapping[str, object]) -> None:
    unknown = [name for name in names if name not in valid]
    if unknown:
        raise _Usage(f"{option}: got {', '.join(unknown)}, expected some of {', '.join(valid)}")


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


def _names(listed: str | None) -> list[str]:
    from ringray_kernels.bench.contenders import CONTENDERS

    names = list(CONTENDERS) if listed is None else [name.strip() for name in listed.split(",")]
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


def _measure(args: argparse.Namespace) -> int:
    """Runs one stage, or all cases, in this process."""
    device = _device(args.device)
    from ringray_kernels.bench import machine, measure, session, stages

    which: Any = args.stage or ("quick" if args.quick else "all")
    _check_names("--stage", [which], stages.WORK)
    names = _names(args.contenders)
    earlier = measure.earlier(args.resume, machine.environment(device)) if args.resume else ()
    minutes = args.minutes or _MINUTES.get(which, _MINUTES["first_light"])
    path = args.resume or args.json
    with contextlib.nullcontext() if path is None else path.open("a", encoding="utf-8") as file:
        limits, only = (minutes, args.patience or PATIENCE_S), args.only or ("",)
        bench = session.BenchSession(
            device, names, file, *limits, earlier, only=only, staged=args.stage is not None
        )
        if not args.stage and not any(stages.cases(which, bench)):
            raise _Usage(f"--only: no case has {' or '.join(args.only)} in its name, see --list")
        fine = bench.run(stages.WORK[which])
    # A new process can go on where a device was lost.
    return EXIT_HUNG if args.stage and bench.lost else EXIT_OK if fine else EXIT_FAILED


def _conduct(args: argparse.Namespace) -> int:
    """Runs stages in processes of their own."""
    from ringray_kernels.bench import first_light

    which = next(name for name in _MINUTES if getattr(args, name))
    minutes = args.minutes or _MINUTES[which]
    path = args.resume or args.json or Path(time.strftime("first-light-%Y%m%d-%H%M%S.jsonl"))
    if not args.resume and path.exists() and path.stat().st_size:
        raise _Usage(f"--json: {path} has results of another run; --resume {path} goes on with it")
    options = [text for only in args.only or () for text in ("--only", only)]
    options += ["--contenders", args.contenders] if args.contenders else []
    options += ["--patience", str(args.patience)] if args.patience else []
    stages = first_light.STAGES
    if which != "first_light":
        stages = ((first_light.Stage(which, 60 * minutes, PATIENCE_S),), (first_light.SUMMARY,))
    print(f"results: {path}", flush=True)
    return first_light.conduct(stages, path, minutes, options, args.device or "cuda")


def _list(args: argparse.Namespace) -> int:
    from ringray_kernels.bench import problems
    from ringray_kernels.bench.contenders import CONTENDERS

    def names(which: problems.Which) -> list[str]:
        device = args.device or "cuda"
        rings = problems.virtual_points(which, device)
        points = [point.name for point in problems.points(which, device)]
        return points + [ring.name("forward") for ring in rings]

    print("contenders:", ", ".join(CONTENDERS))
    quick = names("quick")
    for name in names("all"):
        print(f"{name}{'  (quick too)' if name in quick else ''}")
    return EXIT_OK


def _check_options(args: argparse.Namespace) -> None:
    for name in ("minutes", "patience"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise _Usage(f"--{name}: got {value:g}, expected more than 0")
    path = args.resume or args.json
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise _Usage(f"cannot write {path}: {error.strerror}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit code.

    0: success; 1: one of our kernels is wrong or failed, a figure was refused, a stage failed, or
    nothing was measured; 2: wrong command line or machine; 3: a kernel hung; 130: interrupted.
    """
    try:
        args = parser().parse_args(argv)
        if not args.compile_only and (args.target or args.head_dim):
            raise _Usage("--target and --head-dim go with --compile-only")
        if args.compile_only:
            return _compile_only(args)
        if args.list:
            return _list(args)
        if not (args.quick or args.all or args.first_light or args.stage):
            raise _Usage("expected --first-light, --quick, --all, --list or --compile-only")
        _check_options(args)
        whole = args.first_light or (args.resume and not args.stage)
        return _conduct(args) if whole else _measure(args)
    except _Usage as error:
        print(f"ringray_kernels.bench: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
