"""Block configurations of the Triton kernels: their form, and the hardware that each one fits.

Needs neither torch nor triton, so that specs are checked without them. The caller passes a
configuration in, the same on every rank; this module does not look at the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

Kernel = Literal["forward", "dq", "dkv"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
Path = Literal["pointers", "descriptors", "specialised"]

# Options of kernels that older records name.
_KIB = 1024
_FP8_DEPTH = 32  # elements: the least over which a product in e4m3 sums


@dataclass(frozen=True)
class Target:
    """A GPU architecture.

    ``shared_bytes``: the most shared memory of one block of threads; ``descriptors``: it has bulk
    copies by tensor descriptor; ``wgmma``: it has Hopper's asynchronous products.
    """

    name: str
    shared_bytes: int
    warp_size: int = 32
    descriptors: bool = False
    wgmma: bool = False

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")

    @property
    def fp8(self) -> bool:
        """True if its tensor cores multiply e4m3."""
        return not self.is_amd and int(self.name[3:]) >= 89


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", 163 * _KIB),
        Target("sm_86", 99 * _KIB),
        Target("sm_89", 99 * _KIB),
        Target("sm_90", 227 * _KIB, descriptors=True, wgmma=True),
        Target("sm_100", 227 * _KIB, descriptors=True),
        Target("sm_120", 99 * _KIB),
        Target("gfx90a", 64 * _KIB, warp_size=64),
        Target("gfx942", 64 * _KIB, warp_size=64),
        Target("gfx950", 160 * _KIB, warp_size=64),
    )
}


def target_named(name: str) -> Target:
    """Returns the target called ``name``, or a compatible one under that name.

    Raises:
        ValueError: no known target is compatible.
    """
    if name in TARGETS:
        return TARGETS[name]
    match = re.fullmatch(r"sm_(\d+)", name)
    if match:
        alike = {8: "sm_86", 9: "sm_90", 10: "sm_100", 12: "sm_120"}.get(int(match[1]) // 10)
        if alike:
            return replace(TARGETS[alike], name=name)
    raise ValueError(f"target: got {name!r}, expected one of {', '.join(TARGETS)}")


@dataclass(frozen=True)
class BlockConfig:
    """The tiles of one kernel.

    A tile has ``block_m`` query rows by ``block_n`` key rows; a program has ``warps`` and keeps
    ``stages`` of tiles in flight. ``path``: the way of tiles to shared memory, by ``pointers``
    (everywhere), by tensor ``descriptors`` (bulk copies; Hopper and later, aligned tensors), or
    ``specialised``: by a separate warp beside two groups of four that compute (Hopper). ``pack``:
    query heads of one key/value head that share a block of query rows. ``split``: dK and dV in
    sequence, each with the registers of both, for large head dims (the dkv kernel only).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    path: Path = "pointers"
    pack: int = 1
    split: bool = False

    _TEXT = re.compile(
        r"(\d+)x(\d+)/(\d+)/(\d+)(?:/(descriptors|specialised))?(?:/pack(\d+))?(/split)?"
    )

    @classmethod
    def parse(cls, text: str) -> BlockConfig:
        """Reads the text of ``str``: ``128x64/8/2``, ``64x64/4/3/descriptors/pack4``.

        Raises:
            ValueError: with the given and the expected text.
        """
        match = cls._TEXT.fullmatch(text.strip())
        if not match:
            raise ValueError(
                f"block config: got {text!r}, expected block_m x block_n / warps / stages, "
                "optionally followed by /descriptors or /specialised, /packN, /split in this "
                "order, as in 128x64/8/2/descriptors"
            )
        block_m, block_n, warps, stages = (int(match[i]) for i in range(1, 5))
        path = cast("Path", match[5] or "pointers")
        return cls(block_m, block_n, warps, stages, path, int(match[6] or 1), bool(match[7]))

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n}/{self.warps}/{self.stages}"
        text += f"/{self.path}" if self.path != "pointers" else ""
        text += f"/pack{self.pack}" if self.pack != 1 else ""
        return text + ("/split" if self.split else "")


@dataclass(frozen=True)
class Blocks:
    """One configuration per kernel; None is the default for the hardware and head dim."""

    forward: BlockConfig | None = None
    dq: BlockConfig | None = None
    dkv: BlockConfig | None = None
    text: str = field(init=False, repr=False, compare=False)  # what ``parse`` reads

    def __post_init__(self) -> None:
        # A compiler reads an attribute, but traces no formatting.
        named = [f"{kernel}={config}" for kernel, config in self.given.items()]
        object.__setattr__(self, "text", ",".join(named))

    @classmethod
    def parse(cls, text: str) -> Blocks:
        """Reads the text of ``str``: ``forward=128x64/8/2,dkv=64x128/8/2``.

        Raises:
            ValueError: with the given and the expected text.
        """
        named: dict[str, BlockConfig] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in KERNELS or name in named:
                raise ValueError(
                    f"blocks: got {part.strip()!r}, expected forward=..., dq=..., dkv=... once "
                    "each, separated by commas"
                )
            named[name] = BlockConfig.parse(value)
        return cls(**named)

    @property
    def given(self) -> dict[Kernel, BlockConfig]:
        """The configurations that are not the default, by kernel."""
        configs = {name: getattr(self, name) for name in KERNELS}
        return {name: config for name, config in configs.items() if config is not None}

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Problem:
    """A problem that a configuration must fit. ``group``: query heads per key/value head;
    ``aligned``: the streamed tensors have unit stride along D and 16-byte aligned rows;
    ``value_dim``: head dim of V, 0 if it is that of Q; ``extended``: see ``api.Operands``."""

    kernel: Kernel
    head_dim: int
    itemsize: int
    group: int = 1
    aligned: bool = True
    value_dim: int = 0
    extended: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head dims of Q and of V."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def width(self) -> int:
        """The widest row of a tile, in elements."""
        return max(sum(head_dim_parts(dim, self.itemsize)) for dim in self.head_dims)


def head_dim_parts(head_dim: int, itemsize: int = 2) -> tuple[int, int]:
    """Returns one or two powers of two of at least 16, in one byte 32, that cover ``head_dim``.

    A product is the sum over both: 96 is 64 + 32 and 80 is 64 + 16, not the next power of two, 128.
    """
    least = _FP8_DEPTH if itemsize == 1 else 16
    first = max(least, 1 << (head_dim.bit_length() - 1))
    if head_dim <= first:
        return first, 0
    rest = max(least, 1 << (head_dim - first - 1).bit_length())
    return (first, rest) if rest < first else (2 * first, 0)


def supports(config: BlockConfig, problem: Problem, target: Target) -> str | None:
    """Returns why ``config`` cannot compute ``problem`` on ``target``, or None if it may.

    Shared memory is an estimate: the compiler may still refuse a configuration that passes here.
    """
    for name in ("block_m", "block_n"):
        value = getattr(config, name)
        if not (16 <= value <= 256 and value & (value - 1) == 0):
            return f"{name}: got {value}, expected a power of two from 16 to 256"
    if config.warps not in (1, 2, 4, 8, 16):
        return f"warps: got {config.warps}, expected 1, 2, 4, 8 or 16"
    if not 1 <= config.stages <= 8:
        return f"stages: got {config.stages}, expected 1 to 8"
    if config.pack < 1 or config.pack & (config.pack - 1) or problem.group % config.pack:
        return (
            f"pack: got {config.pack}, expected a power of two that divides the "
            f"{problem.group} query heads per key/value head"
        )
    if problem.itemsize == 1 and (not target.fp8 or config.block_n < _FP8_DEPTH):
        return f"e4m3 takes sm_89 or later and block_n of at least {_FP8_DEPTH}, got {target.name}"
    if config.split and problem.kernel != "dkv":
        return f"split: the {problem.kernel} kernel has one result, expected the dkv kernel"
    if config.pack > 1 and problem.kernel == "dkv":
        return "pack: the dkv kernel walks the query heads one by one, expected 1"
    if config.block_m < 16 * config.pack:
        return f"pack: got {config.pack}, expected at most block_m / 16 = {config.block_m // 16}"
    reason = _path_unsupported(config, problem, target) if config.path != "pointers" else None
    if reason:
        return f"path: {reason}"
    registers = _accumulators(config, problem.kernel, problem.width) // (
        config.warps * target.warp_size
    )
    if registers > 256:
        return f"accumulators take {registers} registers a thread, expected at most 256"
    shared = _shared_bytes(config, problem, problem.width, target)
    if shared > target.shared_bytes:
        return (
            f"tiles take about {shared // _KIB} KiB of shared memory, "
            f"{target.name} has {target.shared_bytes // _KIB}"
        )
    return None


def _path_unsupported(config: BlockConfig, problem: Problem, target: Target) -> str | None:
    """Returns why tiles cannot be copied by descriptors, or None."""
    if not target.descriptors:
        return f"{target.name} has no tensor descriptors, expected pointers"
    for dim in problem.head_dims:
        if head_dim_parts(dim, problem.itemsize)[1]:
            return f"head dim {dim} takes two parts, expected pointers"
    if not problem.aligned or any(dim * problem.itemsize % 16 for dim in problem.head_dims):
        return "descriptors need unit stride along D and 16-byte aligned rows"
    if config.path == "specialised":
        if not target.wgmma:
            return f"specialised is for Hopper, got {target.name}"
        if problem.itemsize != 2 or problem.head_dim != problem.width:
            return "specialised is for 16-bit elements and powers of two as head dim"
        if len({*problem.head_dims}) > 1 or problem.extended:
            return (
                "specialised is for one head dim of q, k and v, and neither softcap, bias nor "
                "dropout"
            )
        if problem.kernel == "dq" and config.stages < 3:
            return f"specialised dq frees a tile late: got {config.stages} stages, expected 3"
        own = config.block_n if problem.kernel == "dkv" else config.block_m
        if (own, config.warps, config.pack, config.split) != (128, 8, 1, False):
            return (
                "specialised takes 128 rows that stay (block_n in dkv, else block_m), "
                "8 warps (two groups), no packing and no splitting"
            )
    return None


def _accumulators(config: BlockConfig, kernel: Kernel, width: int) -> int:
    """Returns the fp32 elements that a program keeps in registers: results and a tile of scores."""
    rows = config.block_m
    if kernel == "dkv":
        rows = config.block_n if config.split else 2 * config.block_n
    return rows * width + config.block_m * config.block_n


def _shared_bytes(config: BlockConfig, problem: Problem, width: int, target: Target) -> int:
    """Estimates the bytes of two streamed tensors (K and V, or Q and dO) of ``stages`` tiles each
    and, on NVIDIA, of the resident tiles; before Hopper, forward keeps its one (Q) in registers."""
    streamed, resident = config.block_n, config.block_m
    tensors = {"forward": 1 if target.descriptors else 0, "dq": 2, "dkv": 2}[problem.kernel]
    if problem.kernel == "dkv":
        streamed, resident = resident, streamed
    rows = 2 * streamed * config.stages + (0 if target.is_amd else tensors * resident)
    return rows * width * problem.itemsize
