"""The configuration of each kernel where none is given, by hardware and head dim.

Where the numbers come from: compiled for the target (registers, spills, shared memory; see
docs/kernels.md), not yet measured on a GPU, except where a line says so.
"""

from __future__ import annotations

from ringray_kernels.config import (
    BlockConfig,
    Blocks,
    Kernel,
    Problem,
    Target,
    head_dim_parts,
    supports,
)

# By family and kernel: (largest head dim, configuration), in the order in which they are tried.
_HOPPER: dict[Kernel, list[tuple[int, str]]] = {
    "forward": [
        (64, "128x128/8/3/descriptors"),
        (128, "128x128/8/2/descriptors"),
        (256, "128x64/8/2/descriptors"),
        (64, "128x64/8/3"),
        (128, "128x64/8/2"),
        (256, "64x64/8/2"),
        (256, "64x32/8/2"),
    ],
    "dq": [
        (64, "128x64/8/3/descriptors"),
        (128, "128x64/8/2/descriptors"),
        (256, "128x32/8/2/descriptors"),
        (128, "128x64/8/2"),
        (256, "64x32/8/2"),
        (256, "32x32/4/2"),
    ],
    "dkv": [
        (128, "64x128/8/2/descriptors"),
        (256, "32x128/8/2/descriptors/split"),
        (64, "64x128/8/2"),
        (128, "32x128/8/2"),
        (192, "32x64/8/2"),
        (256, "32x64/8/1/split"),
        (256, "16x64/8/2"),
    ],
}
_AMPERE: dict[Kernel, list[tuple[int, str]]] = {
    "forward": [
        (64, "128x64/8/3"),
        (128, "128x64/8/2"),
        (256, "64x64/8/2"),
        (256, "64x32/8/2"),
    ],
    "dq": [(128, "64x64/8/2"), (256, "64x32/8/2"), (256, "32x32/4/2")],
    "dkv": [
        (64, "64x64/8/2"),
        (128, "32x64/8/2"),
        (192, "32x32/4/2"),
        (256, "32x64/8/1/split"),
        (256, "16x64/8/2"),
    ],
}
_CDNA: dict[Kernel, list[tuple[int, str]]] = {
    "forward": [(64, "128x64/4/2"), (128, "128x32/4/2"), (256, "64x32/4/1")],
    "dq": [(128, "64x32/4/2"), (256, "64x32/4/1")],
    "dkv": [(128, "32x64/4/2"), (256, "16x64/4/1")],
}
# Four bytes an element. A product of fp32 takes three of tf32, and three times their registers.
_WIDE: dict[Kernel, list[tuple[int, str]]] = {
    "forward": [(64, "64x32/8/2"), (128, "32x16/8/2"), (256, "16x16/8/2"), (256, "16x16/8/1")],
    "dq": [(64, "32x32/4/2"), (128, "16x32/4/2"), (256, "16x16/8/1")],
    "dkv": [(64, "32x32/4/2"), (128, "16x32/8/1/split"), (256, "16x16/8/1")],
}

# Hopper's kernels with a warp that copies, by head dim. Not the defaults before they are measured.
SPECIALISED = {
    64: Blocks.parse("forward=128x128/8/3/specialised,dkv=64x128/8/2/specialised"),
    128: Blocks.parse("forward=128x128/8/2/specialised,dkv=64x128/8/2/specialised"),
    256: Blocks.parse("forward=128x64/8/2/specialised"),
}


def default(problem: Problem, target: Target) -> BlockConfig:
    """The first configuration of the table that fits.

    Raises:
        ValueError: none does.
    """
    family = _CDNA if target.is_amd else _HOPPER if target.descriptors else _AMPERE
    table = _WIDE if problem.itemsize == 4 else family
    reason: str | None = "no configuration"
    for head_dim, text in table[problem.kernel]:
        if sum(head_dim_parts(problem.head_dim)) <= head_dim:
            config = BlockConfig.parse(text)
            reason = supports(config, problem, target)
            if reason is None:
                return config
    raise ValueError(
        f"no {problem.kernel} configuration for head dim {problem.head_dim}, "
        f"{problem.itemsize}-byte elements, on {target.name}: {reason}"
    )
