"""What listings of compiled kernels show beyond the counts of the product: operands of asynchronous
products that may change, which neither an interpreter nor a model shows, and exponentials beside
products under way. A compiler's mistakes show here, too."""

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

# Instructions whose first register is read, not written: stores, barriers, jumps, predicates.
_WRITES_NONE = re.compile(
    r"ST|RED|ATOM|BAR|BRA|EXIT|WARP|SYNCS|NOP|DEPBAR|BSSY|BSYNC|R2UR|ISETP|FSETP|PLOP|VOTE|FENCE"
    r"|MEMBAR|CCTL|ERRBAR|ELECT|U"
)
_FROM_REGISTERS = re.compile(r"[HQ]GMMA\S*\s+R\d+,\s*R(\d+),\s*gdesc")
_OPERAND_REGISTERS = 4  # of a left operand: 16 rows a warp, 16 columns of 16 bits or 32 of 8
_WAIT = re.compile(r"DEPBAR\.LE gsb0, 0x([0-9a-f]+)")


def hazards(made: Compiled) -> list[str]:
    """Returns the instructions that may change an operand of a product under way."""
    if "ptx" not in made.asm:
        return []
    return live_operand_writes(sass_instructions(made.listing))


def _written(text: str) -> set[int]:
    """Returns the registers that an instruction of SASS, without its predicate, writes."""
    match = re.match(r"\S+\s+(?:P\w+,\s*)?R(\d+)\b", text)
    if _WRITES_NONE.match(text) or match is None:
        return set()
    columns = re.match(r"[HQ]GMMA\S*?x(\d+)x", text)
    wide = 4 if re.match(r"\S*\.128|LDSM", text) else 2 if re.match(r"\S*(\.64|WIDE)", text) else 1
    first = int(match[1])
    return set(range(first, first + (int(columns[1]) // 2 if columns else wide)))


def live_operand_writes(code: list[Instruction]) -> list[str]:
    """Returns the instructions of inner loops that write a register which a product under way reads
    as its left operand (triton issue 9433), each after that product."""
    writes: dict[str, None] = {}
    for loop in inner_loops(code, SASS.product):
        live: list[tuple[int, set[int], str]] = []  # the group of a product, registers, text
        group = 0
        # Twice: what is under way at the end is so at the beginning.
        for instruction in [*loop, *loop]:
            text = re.sub(r"^@!?U?P\w+\s+", "", instruction.text)
            wait = _WAIT.search(text)
            if wait:
                live = [use for use in live if use[0] >= group - int(wait[1], 16)]
            for _, registers, product in live:
                if not re.match("[HQ]GMMA", text) and registers & _written(text):
                    writes[f"{text} after {product}"] = None
            operand = _FROM_REGISTERS.match(text)
            if operand:
                first = int(operand[1])
                live.append((group, set(range(first, first + _OPERAND_REGISTERS)), text))
            group += "GMMA" in text and "gsb0" in text
    return list(writes)


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
