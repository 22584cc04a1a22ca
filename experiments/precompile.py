"""Compilation, by one process per core, of the kernels that the benchmark's first light launches.

    PYTHONPATH=.:kernels python experiments/precompile.py

Without a GPU it compiles for sm_90 and keeps of the cache what a run reads. It can be carried to a
machine with the same Python and triton: `TRITON_CACHE_DIR` must be the same path there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from ringray_kernels.bench import measure, problems
from ringray_kernels.bench.contenders import CONTENDERS, Contender, is_ours
from ringray_kernels.bench.problems import Point
from ringray_kernels.config import target_named
from ringray_kernels.inspect.compiled import absent

PRESENT = torch.cuda.is_available()
LONGEST = 64 * 1024  # longer ones take the same code
UNREAD = (".ttir", ".ttgir", ".llir", ".ptx", ".source")  # of a kernel in the cache


def jobs() -> Iterator[tuple[Point, Contender]]:
    """Yields one of the calls that take the same code."""
    codes = set()
    points = [*problems.smoke_points("cuda"), *problems.points("all", "cuda")]
    for point in (one for one in points if one.seq_len <= LONGEST):
        for name, contender in CONTENDERS.items():
            code = (name, point.direction, point.head_dim, point.heads == point.kv_heads,
                    point.dtype, point.form == "hops")  # fmt: skip
            if is_ours(name) and code not in codes and able(contender, point):
                codes.add(code)
                yield point, contender


def able(contender: Contender, point: Point) -> bool:
    if PRESENT:
        return contender.unsupported(point, torch.device("cuda", 0)) is None
    if contender.quantized:
        return point.direction == "forward" and point.is_half
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        return contender.unsupported(point, torch.device("cuda", 0)) is None


def compile_calls(point: Point, contender: Contender) -> str | None:
    """Compiles what `contender` launches at `point`; returns the error or None."""
    ours: Any = contender
    try:
        with contextlib.nullcontext() if PRESENT else absent(target_named("sm_90")):
            inputs = problems.make_inputs(point, torch.device("meta"), 0)
            replace(ours, backend="triton").prepare(point, inputs)()
    except Exception as error:  # of any type: it comes again where the contender is measured
        return measure.failure("", "", error).reason
    return None


def main() -> None:
    """Compiles all, and prints errors and the number of kernels."""
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=spawn) as pool:
        running = {pool.submit(compile_calls, *job): job for job in jobs()}
        for done in as_completed(running):
            if error := done.result():
                point, contender = running[done]
                print(f"{point.name} {contender}: {error}", flush=True)
    folder = Path(triton.knobs.cache.dir)
    for path in folder.rglob("*") if not PRESENT else ():
        if path.suffix in UNREAD:
            path.unlink()
    count = sum(1 for _ in folder.rglob("*.cubin"))
    print(f"{len(running)} calls, {count} kernels in {folder}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
