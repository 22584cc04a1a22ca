"""Disassembly: instruction classes, loops, and the contents of inner loops.

Registers saved around a loop cost almost nothing; those saved in it cost every tile. So spills are
counted in all and in the *inner* loops: those with matrix products and without an inner loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_AS_LONG = 1.2  # of the shortest loop


class Instruction(NamedTuple):
    """One instruction. ``jump``: the index of its target if it is a branch."""

    text: str
    jump: int | None


@dataclass(frozen=True)
class Syntax:
    """The patterns of one vendor's disassembler; the group of ``spill`` is the width, if any."""

    classes: dict[str, str]
    product: str
    spill: str


SASS = Syntax(
    {
        "wgmma": r"[HQ]GMMA",
        "tcgen05": r"UTC[HQ]MMA",
        "mma": r"\b[HQ]MMA",
        "cp.async": r"LDGSTS",
        "bulk": r"UTMALDG|UBLKCP",
        "ex2": r"MUFU\.EX2",
        "ffma": r"\bFFMA",
    },
    r"[HQ]GMMA|UTC[HQ]MMA|\b[HQ]MMA|\bFFMA",
    r"\b(?:STL|LDL(?:\.LU)?)(?:\.(64|128))?",
)
GCN = Syntax(
    {"mfma": r"v_mfma", "ex2": r"v_exp_f32", "global load": r"(?:global|buffer)_load"},
    r"v_mfma",
    r"scratch_(?:store|load)_dword(?:x(\d))?",
)


def sass_instructions(listing: str) -> list[Instruction]:
    """Reads the output of ``cuobjdump -sass``."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", listing, re.MULTILINE)
    index = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    result = []
    for _, text in lines:
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        result.append(Instruction(text, index.get(int(target[1], 16)) if target else None))
    return result


def gcn_instructions(listing: str) -> list[Instruction]:
    """Reads AMD's assembly text."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        text = line.split(";")[0].strip()
        label = re.fullmatch(r"(\.?\w+):", text)
        if label:
            labels[label[1]] = len(lines)
        elif text and not text.startswith("."):
            lines.append(text)
    result = []
    for text in lines:
        target = re.match(r"s_c?branch\w*\s+(\.?\w+)", text)
        result.append(Instruction(text, labels.get(target[1]) if target else None))
    return result


def inner_loops(code: list[Instruction], product: str) -> list[list[Instruction]]:
    """Returns the bodies of the loops with matrix products that contain no other such loop.

    Backward jumps after the last exit are not loops: compilers put retried waits there.
    """
    exits = [i for i, (text, _) in enumerate(code) if re.search(r"\bEXIT\b|s_endpgm", text)]
    end = exits[-1] if exits else len(code)
    spans = sorted(
        (jump, i)
        for i, (_, jump) in enumerate(code[:end])
        if jump is not None and jump < i and count(code[jump : i + 1], product)
    )
    return [
        code[first : last + 1]
        for first, last in spans
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
    ]


def whole_tiles(loops: list[list[Instruction]]) -> list[list[Instruction]]:
    """Returns the inner loops over whole tiles, one per warp group that has its own code: the
    shortest, and those about as long."""
    least = min(map(len, loops), default=0)
    return [loop for loop in loops if len(loop) <= least * _AS_LONG]


def count(code: list[Instruction], pattern: str) -> int:
    """Returns the number of instructions that match ``pattern``."""
    return sum(bool(re.search(pattern, instruction.text)) for instruction in code)


def spilled_bytes(code: list[Instruction], pattern: str) -> int:
    """Returns the bytes that a thread moves to and from its stack in one pass of ``code``."""
    total = 0
    for instruction in code:
        if match := re.search(pattern, instruction.text):
            width = int(match[1] or 0)  # in bits of NVIDIA's, in words of AMD's
            total += width // 8 if width >= 64 else 4 * max(1, width)
    return total
