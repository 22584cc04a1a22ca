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
    # A warp group of the specialised kernels is alone with its memory.
    apart = made.config.path == "specialised"
    live = live_operand_writes(sass_instructions(made.listing))
    return live if apart else live + unsynchronised_writes(made.asm["ptx"])


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


def unsynchronised_writes(ptx: str) -> list[str]:
    """Returns the writes to shared memory in inner loops with products that follow a wait for
    products without a barrier between: the wait holds for one warp group, and another may still
    read (triton issue 11047). For kernels of several warp groups that do the same."""
    lines = ptx.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\$\w+):", line))}
    jumps = [re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line) for line in lines]
    code = [
        Instruction(line, labels.get(jump[1]) if jump else None)
        for line, jump in zip(lines, jumps, strict=True)
    ]
    writes: dict[str, None] = {}
    for loop in inner_loops(code, r"wgmma\.mma"):
        under_way, apart = 0, False
        for instruction in [*loop, *loop]:
            text = instruction.text
            wait = re.search(r"wgmma\.wait_group\S*\s+(\d+)", text)
            under_way += "wgmma.commit" in text
            if wait:
                apart = apart or under_way > int(wait[1])
                under_way = min(under_way, int(wait[1]))
            elif re.search(r"bar\.sync|barrier\.(cta|sync)", text):
                apart = False
            elif apart and re.search(r"st\.shared|cp\.async\.(bulk|c[ag])|stmatrix", text):
                writes[text.strip()] = None
    return list(writes)
