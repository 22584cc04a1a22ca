"""Hazards of asynchronous products on Hopper that neither an interpreter nor a model shows: code in
which an operand of a product under way may change. A compiler's mistakes show here, too."""

from __future__ import annotations

import re

from ringray_kernels.inspect.compiled import Compiled
from ringray_kernels.inspect.listing import SASS, Instruction, inner_loops, sass_instructions

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
