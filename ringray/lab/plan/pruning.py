"""Which points of a sweep can never run, and which field is to blame.

``impossible`` needs no cluster; what depends on where a point runs is ``unfit``, which a cluster
asks again once it knows what ``device: auto`` means there. Imports neither torch nor ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringray import transport
from ringray.lab.kinds import KINDS
from ringray.lab.plan.cost_model import choose_walks
from ringray.traffic import geometry, walk
from ringray_kernels.backends import PREFERRED
from ringray_kernels.config import TARGETS, Blocks, Kernel, Problem, supports
from ringray_kernels.dtypes import DTYPES

if TYPE_CHECKING:
    from ringray.lab.trial.config import TrialConfig

RANK_BYTES = 1 << 46  # of q, k and v on one rank: 64 TiB, more than any device or host has
ORACLE_BYTES = 4 << 30  # scores of one oracle call, all heads
TEXT_BLOCKS = ("triton",)  # backends whose blocks are a text in specs; the others take a number

# Query-key pairs, all heads and passes, backward counted as the three forward passes that it takes.
# One takes 2 to 25 us in the interpreter on one core of an AMD EPYC (head dims 16 to 256, tiles of
# 16 x 16 and up), so that the largest problem ends within the default timeout of a trial.
INTERPRETED_PAIRS = 4_000_000
_BACKWARD_PASSES = 3
_TILE_ROWS = 128  # a tile costs the same however few of its keys are seen


@dataclass(frozen=True)
class Reason:
    """Why a point is pruned: the spec's field and what is wrong with it."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def impossible(kind: str, config: TrialConfig) -> Reason | None:
    """Why a point can never run anywhere, or None."""
    if KINDS[kind].oracle_passes:
        scores = 8 * config.batch * config.heads * config.seq_len**2
        if scores > ORACLE_BYTES:
            return Reason(
                "problem.seq_len",
                f"the fp64 oracle of {config.seq_len} tokens needs {scores >> 30} GiB for its "
                f"scores, more than {ORACLE_BYTES >> 30}; check shorter lengths",
            )
    if config.heads % config.kv_heads:
        return Reason(
            "problem.kv_heads",
            f"{config.heads} heads are no multiple of {config.kv_heads} K/V heads",
        )
    if config.window is not None and not config.causal:
        return Reason(
            "problem.window",
            f"window {config.window} looks back from its query, which needs causal: true",
        )
    if isinstance(config.documents, tuple) and sum(config.documents) != config.seq_len:
        return Reason(
            "problem.documents",
            f"lengths sum to {sum(config.documents)}, expected seq_len {config.seq_len}",
        )
    return _too_large(config) or _unsendable(config) or unfit(config, config.device)


def _too_large(config: TrialConfig) -> Reason | None:
    """Inputs that fit nowhere; whatever is counted of smaller ones fits into 64 bits."""
    rows = config.padded // config.ring_size
    row = (config.heads + 2 * config.kv_heads) * config.head_dim * DTYPES[config.dtype].itemsize
    given = config.batch * rows * row
    if given <= RANK_BYTES:
        return None
    return Reason(
        "problem.seq_len",
        f"q, k and v of a rank take {given >> 40:,} TiB, more than {RANK_BYTES >> 40}; "
        "take shorter sequences, smaller batches or more ranks",
    )


def _unsendable(config: TrialConfig) -> Reason | None:
    """Prunes a transport that does not fit ring and heads, and an impossible walk back."""
    try:
        exchange = transport.plan(config.transport, config.ring_size, config.heads, config.kv_heads)
    except ValueError as error:
        return Reason("strategy.transport", str(error))
    try:
        back = walk.resolve_backward(config.backward, config.transport, walks=exchange.walks)
        if back == "reverse":  # the mask may forbid it, and the forward pass alone needs it too
            choose_walks(config, exchange)
    except walk.Unwalkable as error:
        return Reason("strategy.backward", str(error))
    return None


def interpreted(config: TrialConfig, device: str) -> bool:
    """Whether a point on ``device`` runs in Triton's interpreter."""
    return device == "cpu" and config.backend == "triton"


def unfit(config: TrialConfig, device: str) -> Reason | None:
    """Why a point cannot run on ``device``, or None; ``auto`` leaves open what depends on it."""
    return _wrong_blocks(config, device) or _too_slow(config, device)


def _wrong_blocks(config: TrialConfig, device: str) -> Reason | None:
    """Blocks of another backend's kind, or that fit no GPU."""
    if config.blocks is None:
        return None
    backend, named = config.backend, f"backend {config.backend}"
    if backend == "auto":
        if device == "auto":
            return None
        backend = PREFERRED[device][0]
        named = f"backend auto ({backend} on {device})"
    given = f"got {config.blocks}, {named} takes"
    blocks = config.cut
    if isinstance(blocks, Blocks):
        if backend in TEXT_BLOCKS:
            return _fits_nowhere(config, blocks)
        return Reason("strategy.blocks", f"{given} null or a number of query rows per call")
    if backend in TEXT_BLOCKS:
        return Reason("strategy.blocks", f"{given} null or a text such as 'forward=128x64/8/2'")
    return None


def _fits_nowhere(config: TrialConfig, blocks: Blocks) -> Reason | None:
    kernels: tuple[Kernel, ...] = ("forward", "dq", "dkv")
    for kernel in kernels:
        given = getattr(blocks, kernel)
        if given is None:
            continue
        group = config.heads // config.kv_heads
        problem = Problem(kernel, config.head_dim, DTYPES[config.dtype].itemsize, group)
        reasons = {name: supports(given, problem, target) for name, target in TARGETS.items()}
        if all(reasons.values()):
            return Reason(
                "strategy.blocks", f"{kernel}={given} fits no known GPU: {reasons['sm_90']}"
            )
    return None


def _too_slow(config: TrialConfig, device: str) -> Reason | None:
    if not interpreted(config, device):
        return None
    edges = config.seq_len * config.ring_size * _TILE_ROWS
    pairs = (geometry.total_visible(config.mask) + edges) * config.batch * config.heads
    pairs *= (1 + _BACKWARD_PASSES * config.has_backward) * (config.warmup + config.repeats)
    if pairs <= INTERPRETED_PAIRS:
        return None
    return Reason(
        "problem.seq_len",
        f"backend triton runs on a CPU in Triton's interpreter, which is for small sizes: "
        f"{pairs:.1e} query-key pairs of all heads and passes, more than {INTERPRETED_PAIRS:.1e}; "
        "take shorter lengths, fewer heads or repeats, or GPUs",
    )
