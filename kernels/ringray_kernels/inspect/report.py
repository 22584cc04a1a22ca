"""``bench --compile-only``: a table of the code of every default configuration, without a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from ringray_kernels.config import KERNELS
from ringray_kernels.inspect.compiled import Case, Compiled, compile_case

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_COLUMNS = "{:7} {:8} {:>4} {:9} {:38} {:>5} {:>7} {:>7} {:>7}  {}"


def default_cases(targets: Sequence[str], head_dims: Sequence[int]) -> list[Case]:
    """Returns all defaults in 16 bits, and those of head dims 64 and 256 in 32."""
    cases = [Case(t, k, d) for t, k, d in product(targets, KERNELS, head_dims)]
    wide = [d for d in head_dims if d in (64, 256)]
    return cases + [Case(t, k, d, "float32") for t, k, d in product(targets, KERNELS, wide)]


def _attempt(case: Case) -> Compiled | str:
    try:
        return compile_case(case)
    except Exception as error:  # of many types; other cases go on
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def compile_all(cases: Sequence[Case]) -> Iterator[tuple[Case, Compiled | str]]:
    """Yields each case with its code or the reason for none, in order; one process per core."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from zip(cases, pool.map(_attempt, cases), strict=True)


def record(case: Case, result: Compiled | str) -> dict[str, Any]:
    """Returns one JSON line, without the disassembly."""
    config = None if case.config is None else str(case.config)
    line: dict[str, Any] = {**asdict(case), "config": config}
    if isinstance(result, str):
        return {**line, "status": "failed", "reason": result}
    facts = {k: v for k, v in asdict(result).items() if k not in ("case", "listing", "asm")}
    return {**line, **facts, "status": "ok", "config": str(result.config)}


def main(targets: Sequence[str], head_dims: Sequence[int], json_path: Path | None) -> int:
    """Prints the table and returns 1 if a case did not compile.

    Units: registers per thread; spilled bytes per thread, in all and in the inner loops; shared
    memory in KiB.
    """
    names = "target kernel dim dtype config regs spill inner shared instructions"
    print(_COLUMNS.format(*names.split()))
    failed = 0
    for case, result in compile_all(default_cases(targets, head_dims)):
        if json_path is not None:
            with json_path.open("a") as file:
                file.write(json.dumps(record(case, result)) + "\n")
        start = (case.target, case.kernel, case.head_dim, case.dtype)
        if isinstance(result, str):
            failed += 1
            print(_COLUMNS.format(*start, "-", *"----", result), flush=True)
            continue
        kinds = ", ".join(f"{n} {name}" for name, n in result.instructions.items() if n)
        kinds += " SERIALISED" if result.serialised else ""
        spills, kib = (result.spilled, result.inner_spilled), f"{result.shared_bytes / 1024:.0f}"
        line = _COLUMNS.format(*start, str(result.config), result.registers, *spills, kib, kinds)
        print(line, flush=True)
    return int(failed > 0)
