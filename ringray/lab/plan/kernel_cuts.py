"""Block sizes that kernel-tune tries, for one kernel at a time.

The candidates are those that some known GPU may run; a rank drops those that its own GPU cannot run
or compiles to spills. Imports neither torch nor triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ringray_kernels.backends import BLOCKS, on_device
from ringray_kernels.config import KERNELS, TARGETS, BlockConfig, Blocks, Problem, supports
from ringray_kernels.defaults import default
from ringray_kernels.dtypes import DTYPES

_ROWS = (64, 128, 256, 512, 1024, 2048, 4096)  # query rows of one fused call
_TILES = (32, 64, 128, 256)
_WARPS = (4, 8)
_STAGES = (1, 2, 3, 4)
_MOST_PACKED = 8


def cuts(chosen: Mapping[str, Any], device: str) -> list[int | str | None]:
    """Returns the values of ``blocks`` for one problem, by its backend on ``device``."""
    backend = on_device(chosen["backend"], device)
    if BLOCKS[backend] == "rows":
        return [None, *(rows for rows in _ROWS if rows < chosen["seq_len"])]
    if BLOCKS[backend] != "tiles":
        return [None]
    kernels = KERNELS if chosen["direction"] == "forward+backward" else KERNELS[:1]
    itemsize = DTYPES[chosen["dtype"]].itemsize
    group = max(1, chosen["heads"] // chosen["kv_heads"])
    return [
        str(Blocks(**{kernel: config}))
        for kernel in kernels
        for config in configs(Problem(kernel, chosen["head_dim"], itemsize, group))
    ]


def kernel_of(blocks: object) -> str:
    """Returns the kernel that ``blocks`` names; "" if it is for all kernels."""
    return blocks.partition("=")[0] if isinstance(blocks, str) else ""


def configs(problem: Problem) -> list[BlockConfig]:
    """Returns the configurations that some known GPU may run, the defaults first."""
    unique: dict[BlockConfig, None] = {}
    for target in TARGETS.values():
        with suppress(ValueError):
            unique[default(problem, target)] = None
    for config in _combinations(problem):
        if any(supports(config, problem, target) is None for target in TARGETS.values()):
            unique[config] = None
    return list(unique)


def _combinations(problem: Problem) -> Iterator[BlockConfig]:
    packs = [1]
    if problem.kernel != "dkv":
        packs += [n for n in (2, 4, _MOST_PACKED) if problem.group % n == 0]
    splits = (False, True) if problem.kernel == "dkv" and problem.head_dim > 64 else (False,)
    paths = ("pointers", "descriptors", "specialised")
    every = itertools.product(paths, packs, splits, _TILES, _TILES, _WARPS, _STAGES)
    for path, pack, split, m, n, warps, stages in every:
        yield BlockConfig(m, n, warps, stages, path, pack, split)  # type: ignore[arg-type]
