"""Disassembly: instruction classes, loops, and the contents of inner loops.

Registers saved around a loop cost almost nothing; those saved in it cost every tile. So spills are
counted in all and in the *inner* loops: those with matrix products and without an inner loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction. ``jump``: the index of its target if it is a branch."""

    text: str
    jump: int | None


@dataclass(frozen=True)
class Syntax:
    """The patterns of one vendor's disassembler; a group of ``spill_*`` is the width, if any."""

    classes: dict[str, str]
    product: str
    spill_store: str
    spill_load: str


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
    r"\bSTL(?:\.(64|128))?",
    r"\bLDL(?:\.LU)?(?:\.(64|128))?",
)
GCN = Syntax(
    {"mfma": r"v_mfma", "ex2": r"v_exp_f32", "global load": r"(?:global|buffer)_load"},
    r"v_mfma",
    r"scratch_store_dword(?:x(\d))?",
    r"scratch_load_dword(?:x(\d))?",
)


def sass_instructions(listing: str) -> list[Instruction]:
    """Reads the output of ``cuobjdump -sass``."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", listing, re.MULTILINE)
    index = {int(address, 16): i for i, (address, _) in enumerate(found)}
    result = []
    for _, text in found:
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
        {
            (jump, i)
            for i, (_, jump) in enumerate(code[:end])
            if jump is not None
            and jump < i
            and any(re.search(product, one.text) for one in code[jump : i + 1])
        }
    )
    return [
        code[first : last + 1]
        for first, last in spans
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
    ]


def count(code: list[Instruction], pattern: str) -> int:
    """Returns the number of instructions that match ``pattern``."""
    return sum(bool(re.search(pattern, one.text)) for one in code)


def spilled_bytes(code: list[Instruction], pattern: str) -> int:
    """Returns the bytes that a thread moves to or from its stack in one pass of ``code``."""
    total = 0
    for one in code:
        match = re.search(pattern, one.text)
        if match:
            width = int(match[1] or 0)
            total += width // 8 if width >= 64 else 4 * max(1, width)
    return total


class Loop(NamedTuple):
    """An inner loop. ``spilled``: bytes a thread moves to and from its stack in one pass;
    ``overlapped``: exponentials issued during an asynchronous product, of ``exponentials``;
    ``outside``: instructions of threads, not of the uniform path, during none."""

    instructions: int
    spilled: int
    overlapped: int
    exponentials: int
    outside: int


def described(loop: list[Instruction], syntax: Syntax) -> Loop:
    """Returns the facts of an inner loop.

    On Hopper a product lasts from an HGMMA to the wait that leaves no group outstanding; one that
    is under way at the end of a pass is so at the beginning of the next."""
    groups = inside = outside = 0
    for _ in range(2):
        inside = outside = 0
        for one in loop:
            wait = re.search(r"\bDEPBAR\.LE gsb0, 0x([0-9a-f]+)", one.text)
            if wait:
                groups = min(groups, int(wait[1], 16))
            elif "HGMMA" in one.text:
                groups += 1
            elif groups and "MUFU.EX2" in one.text:
                inside += 1
            outside += not groups and not re.match(r"(@\S+\s+)?U", one.text)
    spilled = sum(spilled_bytes(loop, look) for look in (syntax.spill_store, syntax.spill_load))
    return Loop(len(loop), spilled, inside, count(loop, syntax.classes["ex2"]), outside)


_MMA = re.compile(
    r"^(#\w+) = #ttg\.(?:nvidia_mma|amd_mfma)<\{.*?"
    r"warpsPerCTA = \[(\d+), (\d+)\].*?instrShape = \[(\d+), (\d+)",
    re.MULTILINE,
)
_DOT = re.compile(
    r"= (?:tt\.dot|ttng\.warp_group_dot) .*? : (?:tensor|!ttg\.memdesc)<\d+x(\d+)x.*"
    r"-> tensor<(\d+)x(\d+)x\w+, (#\w+)>"
)


def repetition(ttgir: str) -> float:
    """Returns executed over necessary operations of the matrix products in Triton's GPU code.

    Warps without a part of a tile repeat the part of others: eight warps of 16 rows cover 128 rows,
    so they compute a tile of 64 twice. Products in tensor memory (tcgen05) are not divided among
    warps and do not count.
    """
    cover = {
        name: (int(warps_m) * int(rows), int(warps_n) * int(columns))
        for name, warps_m, warps_n, rows, columns in _MMA.findall(ttgir)
    }
    needed = executed = 0
    for depth, rows, columns, layout in _DOT.findall(ttgir):
        if layout in cover:
            size = int(rows) * int(columns) * int(depth)
            needed += size
            for extent, covered in zip((int(rows), int(columns)), cover[layout], strict=True):
                size *= max(1, covered // extent)
            executed += size
    return executed / needed if needed else 1.0
