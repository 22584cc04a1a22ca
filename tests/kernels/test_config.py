"""Block configurations: their text, what fits where, and a default for everything."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ringray_kernels.config import (
    KERNELS,
    TARGETS,
    BlockConfig,
    Blocks,
    Kernel,
    Problem,
    head_dim_parts,
    supports,
    target_named,
)
from ringray_kernels.defaults import default

TEXTS = [
    "128x64/8/2", "128x64/8/2/descriptors", "64x64/4/3/descriptors/pack4", "16x32/8/1/split",
    "128x128/8/2/specialised",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_config_is_read_back(text: str) -> None:
    assert str(BlockConfig.parse(text)) == text
    blocks = f"forward={text},dkv={text}"
    assert str(Blocks.parse(blocks)) == blocks


@pytest.mark.parametrize("text", ["128x64", "128x64/8/2/fast", "axb/8/2", "64x64/8/2/split/pack4"])
def test_a_text_that_is_no_config(text: str) -> None:
    with pytest.raises(ValueError, match="block config: got"):
        BlockConfig.parse(text)
    for blocks in ("", text, f"backward={text}", "dq=16x16/4/1,dq=16x16/4/1", "atomic_dq"):
        with pytest.raises(ValueError, match="got"):
            Blocks.parse(blocks)


def test_parts_cover_the_head_dim() -> None:
    for head_dim in range(1, 257):
        first, rest = head_dim_parts(head_dim)
        assert first + rest >= head_dim
        assert all(part & (part - 1) == 0 and part >= 16 for part in (first, rest) if part)
        assert rest < first
        # Never more than the next power of two would take.
        assert first + rest <= max(16, 1 << (head_dim - 1).bit_length())


HOPPER = TARGETS["sm_90"]
FORWARD = Problem("forward", 128, 2, group=4)
EIGHT_BITS = Problem("forward", 64, 1)

REFUSED = {
    "block_m: got 96": ("96x64/8/2", FORWARD, "sm_90"),
    "stages: got 9": ("64x64/8/9", FORWARD, "sm_90"),
    "pack: got 4, expected at most": ("32x64/8/2/pack4", FORWARD, "sm_90"),
    "pack: the dkv kernel": ("64x64/8/2/pack4", Problem("dkv", 128, 2, group=4), "sm_90"),
    "split: the dq kernel": ("64x64/8/2/split", Problem("dq", 128, 2), "sm_90"),
    "path: sm_80 has no tensor descriptors": ("128x64/8/2/descriptors", FORWARD, "sm_80"),
    "path: head dim 96 takes two parts": (
        "128x64/8/2/descriptors", Problem("forward", 96, 2), "sm_90",
    ),
    "path: descriptors need unit stride": (
        "128x64/8/2/descriptors", Problem("forward", 128, 2, aligned=False), "sm_90",
    ),
    "path: specialised is for Hopper": ("128x64/8/2/specialised", FORWARD, "sm_100"),
    "path: specialised is for 16-bit": ("128x64/8/2/specialised", Problem("dq", 64, 4), "sm_90"),
    "path: specialised dq frees a tile late": (
        "128x64/8/2/specialised", Problem("dq", 128, 2), "sm_90",
    ),
    "path: specialised takes 128 rows": ("64x64/8/2/specialised", FORWARD, "sm_90"),
    "accumulators take": ("256x128/4/2", FORWARD, "sm_90"),
    "tiles take about": ("128x128/8/3", FORWARD, "sm_86"),
    "e4m3 takes sm_89 or later": ("64x64/4/2", EIGHT_BITS, "sm_86"),
    "e4m3 takes sm_89 or later and": ("64x64/4/2", EIGHT_BITS, "gfx950"),
    "e4m3 takes sm_89 or later and block_n of at least": ("64x16/4/2", EIGHT_BITS, "sm_90"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_fit_is_told(reason: str) -> None:
    text, problem, target = REFUSED[reason]
    said = supports(BlockConfig.parse(text), problem, TARGETS[target])
    assert said.startswith(reason)


@pytest.mark.parametrize("target", TARGETS)
def test_there_is_a_default_for_everything(target: str) -> None:
    for kernel, head_dim, itemsize, aligned, group in itertools.product(
        ("forward", "dq", "dkv"), (1, 16, 33, 64, 80, 96, 128, 192, 255, 256), (2, 4),
        (True, False), (1, 3, 8),
    ):  # fmt: skip
        problem = Problem(kernel, head_dim, itemsize, group, aligned)  # type: ignore[arg-type]
        assert default(replace(problem), TARGETS[target]) is default(problem, TARGETS[target])
        assert supports(default(problem, TARGETS[target]), problem, TARGETS[target]) is None


def test_targets() -> None:
    assert target_named("sm_90") is HOPPER
    assert target_named("sm_87").shared_bytes == TARGETS["sm_86"].shared_bytes
    assert target_named("sm_103").descriptors
    for name in ("sm_70", "gfx1100", "tpu"):
        with pytest.raises(ValueError, match="expected one of sm_80"):
            target_named(name)


@pytest.mark.parametrize("kernel", KERNELS)
def test_hopper_takes_a_specialised_kernel_where_it_computes_the_problem(kernel: Kernel) -> None:
    hopper, plain = TARGETS["sm_90"], Problem(kernel, 128, 2)
    assert default(plain, hopper).path == "specialised"
    assert default(plain, TARGETS["sm_100"]).path == "descriptors"
    others = [
        {"extended": True}, {"aligned": False}, {"itemsize": 4}, {"head_dim": 80}, {"value_dim": 64}
    ]  # fmt: skip
    for other in others:
        assert default(replace(plain, **other), hopper).path != "specialised", other  # type: ignore[arg-type]
