"""Checks of the loops of compiled kernels beyond the counts of the product: exponentials beside
products under way."""

from __future__ import annotations

import re
from typing import NamedTuple

from ringray_kernels.inspect.compiled import Compiled
from ringray_kernels.inspect.listing import (
    SASS,
    Instruction,
    count,
    inner_loops,
    sass_instructions,
    spilled_bytes,
    whole_tiles,
)


class Loop(NamedTuple):
    """An inner loop. ``spilled``: bytes a thread moves to and from its stack in one pass;
    ``overlapped``: exponentials issued during an asynchronous product, of ``exponentials``;
    ``outside``: instructions of threads, not of the uniform path, during none."""

    instructions: int
    spilled: int
    overlapped: int
    exponentials: int
    outside: int


def whole_loops(made: Compiled) -> list[Loop]:
    """Returns the inner loops over whole tiles, of code for NVIDIA."""
    return list(
        map(described, whole_tiles(inner_loops(sass_instructions(made.listing), SASS.product)))
    )


def described(loop: list[Instruction]) -> Loop:
    """Returns the facts of an inner loop of SASS.

    On Hopper a product lasts from an HGMMA to the wait that leaves no group outstanding; one that
    is under way at the end of a pass is so at the beginning of the next."""
    groups = inside = outside = 0
    for _ in range(2):
        inside = outside = 0
        for instruction in loop:
            text = instruction.text
            wait = re.search(r"\bDEPBAR\.LE gsb0, 0x([0-9a-f]+)", text)
            if wait:
                groups = min(groups, int(wait[1], 16))
            elif "HGMMA" in text:
                groups += 1
            elif groups and "MUFU.EX2" in text:
                inside += 1
            outside += not groups and not re.match(r"(@\S+\s+)?U", text)
    spilled, exponentials = spilled_bytes(loop, SASS.spill), count(loop, SASS.classes["ex2"])
    return Loop(len(loop), spilled, inside, exponentials, outside)
