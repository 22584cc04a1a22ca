"""The default configuration of each kernel by hardware and head dim.

The numbers come from compilation for the target (registers, spills, shared memory; see
docs/kernels.md), not from measurements on a GPU, except those on Hopper at head dims 64 and 128.

The warps of a program divide a product by rows of the resident block: eight warps of 16 rows (four
of 32 on CDNA) take 128, and compute a block of 64 twice. So a block has as many rows as its warps
take. Exceptions, because all alternatives that repeat less spill in their loops: fp32 on NVIDIA at
head dims above 64 (all but dq at 128 and forward at 128 on Hopper), and the configurations for
little shared memory (sm_86, sm_89, sm_120) or unaligned tensors at head dim 256; docs/kernels.md
lists them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ringray_kernels.config import TARGETS, BlockConfig, Blocks, Kernel, Problem, Target, supports

# By family and kernel: (largest head dim, configuration), in the order of trial.
_HOPPER: dict[Kernel, list[tuple[int, str]]] = {
    "forward": [
        (128, "128x128/8/3/descriptors"),
        (128, "128x128/8/2/descriptors"),
        (256, "128x64/8/2/descriptors"),
        (64, "128x64/8/3"),
        (192, "128x64/8/2"),
        (256, "128x32/8/2"),
    ],
    "dq": [
        (64, "128x64/8/3/descriptors"),
        (128, "128x64/8/2/descriptors"),
        (256, "128x32/8/2/descriptors"),
        (128, "128x64/8/2"),
        (192, "128x32/8/2"),
        (256, "64x32/8/2"),
    ],
    "dkv": [
        (128, "64x128/8/2/descriptors"),
        (256, "32x128/8/2/descriptors/split"),
        (64, "64x128/8/2"),
        (128, "32x128/8/2"),
        (192, "32x128/8/2/split"),
        (256, "16x128/8/2/split"),
    ],
}
_AMPERE: dict[Kernel, list[tuple[int, str]]] = {
    "forward": [
        (64, "128x64/8/3"),
        (192, "128x64/8/2"),
        (256, "64x64/8/2"),
        (256, "64x32/8/2"),
    ],
    "dq": [
        (96, "128x64/8/2"),
        (128, "64x64/8/2"),
        (192, "128x32/8/2"),
        (256, "32x32/4/2"),
    ],
    "dkv": [
        (96, "32x128/8/2"),
        (128, "64x64/8/2"),
        (192, "32x32/4/2"),
        (256, "64x64/8/1/split"),
        (256, "32x32/4/1/split"),
    ],
}
_CDNA: dict[Kernel, list[tuple[int, str]]] = {
    "forward": [(64, "128x64/4/2"), (128, "128x32/4/2"), (192, "64x16/4/2"), (256, "64x16/4/1")],
    "dq": [(64, "128x32/4/2"), (128, "64x16/4/2"), (256, "64x16/4/1")],
    "dkv": [(64, "16x64/4/2"), (96, "16x64/4/1"), (128, "16x64/4/2"), (256, "16x64/4/1")],
}
# Four bytes per element. On NVIDIA an fp32 product takes three tf32 products and three times their
# registers.
_WIDE_CDNA: dict[Kernel, list[tuple[int, str]]] = {
    "forward": [(64, "128x32/4/2"), (128, "64x16/4/2"), (256, "64x16/4/1")],
    "dq": [(64, "128x16/4/2"), (128, "64x16/4/2"), (256, "64x16/4/1")],
    "dkv": [(128, "16x64/4/2"), (256, "16x64/4/1/split")],
}
_WIDE: dict[Kernel, list[tuple[int, str]]] = {
    "forward": [(64, "128x32/8/2"), (128, "32x16/4/2"), (256, "16x16/8/2"), (256, "16x16/8/1")],
    "dq": [(64, "32x32/4/2"), (128, "16x32/4/2"), (256, "16x16/8/1")],
    "dkv": [(64, "32x32/4/2"), (128, "16x32/8/1/split"), (256, "16x16/8/1")],
}
_WIDE_HOPPER: dict[Kernel, list[tuple[int, str]]] = {
    **_WIDE,
    "forward": [(64, "128x32/8/2"), (128, "128x16/8/2"), (256, "16x16/8/2")],
}

# Forward in one byte where descriptors are; on Hopper a third stage spills by triton 3.6.
_EIGHT_BITS = [(128, "128x64/8/3/descriptors"), (256, "128x32/8/2/descriptors")]
_EIGHT_BITS_HOPPER = [(64, "128x128/8/3/descriptors"), (128, "128x128/8/2/descriptors")]

# Head dims above 256, two bytes per element; four bytes spill in the loops of all that fits.
_LARGE: dict[Kernel, list[str]] = {
    "forward": ["32x32/8/1"],
    "dq": ["32x32/8/1", "16x16/8/1"],
    "dkv": ["16x32/8/1/split"],
}
_LARGE_CDNA: dict[Kernel, list[str]] = {
    "forward": ["32x16/4/1"],
    "dq": ["32x16/4/1"],
    "dkv": ["16x32/4/1/split"],
}

# Hopper's kernels with a copying warp, by head dim: the defaults where they compute the problem.
# Measured on an H100 by triton 3.6 (experiments/results/gpu-h100.defaults.jsonl).
SPECIALISED = {
    64: Blocks.parse(
        "forward=128x128/8/3/specialised,dq=128x64/8/4/specialised,dkv=64x128/8/2/specialised"
    ),
    128: Blocks.parse(
        "forward=128x128/8/2/specialised,dq=128x64/8/4/specialised,dkv=64x128/8/2/specialised"
    ),
    256: Blocks.parse("forward=128x64/8/2/specialised"),
}

# On Hopper, 16 bits, by head dim: other candidates for the fastest configuration of one kernel.
CANDIDATES = {128: [Blocks.parse("dkv=64x64/4/2/descriptors")]}


@cache
def default(problem: Problem, target: Target) -> BlockConfig:
    """Returns the first configuration that fits: on Hopper a specialised one, else of the table.

    Raises:
        ValueError: none fits.
    """
    if target.wgmma and problem.itemsize == 2 and problem.head_dim in SPECIALISED:
        specialised = SPECIALISED[problem.head_dim].given.get(problem.kernel)
        if specialised and supports(specialised, problem, target) is None:
            return specialised
    if target.is_amd:
        narrow, wide = _CDNA, _WIDE_CDNA
    elif target.descriptors:
        narrow, wide = _HOPPER, _WIDE_HOPPER if target.wgmma else _WIDE
    else:
        narrow, wide = _AMPERE, _WIDE
    table = (wide if problem.itemsize == 4 else narrow)[problem.kernel]
    if problem.itemsize == 1:
        table = [*(_EIGHT_BITS_HOPPER if target.wgmma else _EIGHT_BITS), *table]
    if problem.itemsize <= 2:
        large = _LARGE_CDNA if target.is_amd else _LARGE
        table = [*table, *((512, text) for text in large[problem.kernel])]
    reason: str | None = "no configuration"
    for head_dim, text in table:
        if problem.width <= head_dim:
            config = BlockConfig.parse(text)
            reason = supports(config, problem, target)
            if reason is None:
                # What extends a weight takes registers too: half the rows pass by at once.
                crowded = problem.extended and problem.kernel == "dkv" and problem.width > 64
                if crowded and target.descriptors:
                    return replace(config, block_m=max(16, config.block_m // 2))
                return config
    raise ValueError(
        f"no {problem.kernel} configuration for head dim {max(problem.head_dims)}, "
        f"{problem.itemsize}-byte elements, on {target.name}: {reason}"
    )


# The defaults on Hopper where the specialised kernels do not compute a problem: those of Blackwell,
# which has the same table and no specialised kernels.
PORTABLE = {
    head_dim: Blocks(
        **{k: default(Problem(k, head_dim, 2), TARGETS["sm_100"]) for k in blocks.given}
    )
    for head_dim, blocks in SPECIALISED.items()
}
