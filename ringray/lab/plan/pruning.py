"""Pruning of the points of a sweep that can never run, with the field that is wrong.

``impossible`` needs no cluster. ``unfit`` depends on the device; a cluster asks it again once it
knows the device that ``auto`` means there. Imports neither torch nor ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace

from ringray import transport
from ringray.lab.kinds import TrialKind
from ringray.lab.kinds.baselines import BASELINES, DEFAULT
from ringray.lab.predict.cost_model import choose_walks
from ringray.lab.trial import training
from ringray.lab.trial.config import LATER, TrialConfig, TrialProblem
from ringray.traffic import walk
from ringray.training.recipe import check
from ringray_kernels.backends import BLOCKS, GPU_ONLY, INTERPRETED, on_device
from ringray_kernels.config import TARGETS, Blocks, supports
from ringray_kernels.dtypes import DTYPES

RANK_BYTES = 1 << 46  # q, k and v of one rank: 64 TiB, more than any device or host has
ORACLE_BYTES = 4 << 30  # scores of one oracle call, all heads

# Query-key pairs, all heads and passes; backward counts as three forward passes. A pair takes 2 to
# 25 us in the interpreter on one core of an AMD EPYC (head dims 16 to 256, tiles of 16 x 16 and
# up), so the largest problem ends within the default timeout of a trial.
INTERPRETED_PAIRS = 4_000_000
_BACKWARD_PASSES = 3
_TILE_ROWS = 128  # a tile costs the same for any number of visible keys

# Causal attention without anything else.
_PLAIN = {item.name: item.default for item in fields(TrialProblem) if item.default is not MISSING}
# Fields with one value in training; sections of the fields that its check names.
_TRAINS: dict[str, dict[str, object]] = {
    "problem": {"direction": "forward+backward", **_PLAIN},
    "strategy": {"backward": "auto", "backend": "auto", "blocks": None},
}
_SECTIONS = {"size": "ring.size", "seq_len": "problem.seq_len", "transport": "strategy.transport"}

# Fields with one value in decoding; the others have any.
_ANY = {"window", "global_tokens", "new_tokens"}
_DECODES: dict[str, dict[str, object]] = {
    "problem": {
        "direction": "forward",
        **{name: value for name, value in _PLAIN.items() if name not in _ANY},
    },
    "strategy": {"transport": transport.DEFAULT, "backward": "auto", "blocks": None},
    "ring": {"order": LATER["order"]},
}


@dataclass(frozen=True)
class Reason:
    """The reason why a point is pruned: the spec's field and its mistake."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def impossible(kind: TrialKind, config: TrialConfig) -> Reason | None:
    """Returns the reason why a point can never run anywhere, or None."""
    if reason := _undecodable(kind, config) or _untrainable(kind, config):
        return reason
    if kind.trains:
        config = training.ring_config(config, training.from_config(config)[1])
    problem = config.problem
    if kind.oracle_passes:
        scores = 8 * problem.batch * problem.heads * problem.seq_len**2
        if scores > ORACLE_BYTES:
            return Reason(
                "problem.seq_len",
                f"the fp64 oracle of {problem.seq_len} tokens needs {scores >> 30} GiB for its "
                f"scores, more than {ORACLE_BYTES >> 30}; check shorter lengths",
            )
    if problem.heads % problem.kv_heads:
        text = f"{problem.heads} heads is not a multiple of {problem.kv_heads} K/V heads"
        return Reason("problem.kv_heads", text)
    if problem.quantize is not None and problem.has_backward:
        text = f"{problem.quantize} computes no gradients, which needs direction: forward"
        return Reason("problem.quantize", text)
    documents = problem.documents
    if isinstance(documents, tuple) and sum(documents) != problem.seq_len:
        text = f"lengths sum to {sum(documents)}, expected seq_len {problem.seq_len}"
        return Reason("problem.documents", text)
    try:
        _ = problem.mask  # checks what goes together
    except ValueError as error:
        name, _, text = str(error).partition(": ")
        return Reason(f"problem.{name}", text)
    return _too_large(config) or _unsendable(config) or unfit(config, config.ring.device)


def _untrainable(kind: TrialKind, config: TrialConfig) -> Reason | None:
    """Prunes trainings that do not fit their ranks, and masks that a decoder has not."""
    if not kind.trains:
        return None
    if reason := _fixed(config, _TRAINS, "a decoder trains without it"):
        return reason
    try:
        model, degrees, recipe = training.from_config(config)
        check(model, degrees, recipe)
    except ValueError as error:
        name, _, text = str(error).partition(": ")
        return Reason(_SECTIONS.get(name, f"training.{name}"), text)
    try:
        for length in (config.training and config.training.examined) or ():
            check(model, degrees, replace(recipe, seq_len=length, pool=1))
    except ValueError as error:
        return Reason("training.examined", str(error).partition(": ")[2])
    return None


def _undecodable(kind: TrialKind, config: TrialConfig) -> Reason | None:
    """Prunes new tokens of other kinds, and what a step of new tokens does not compute."""
    problem = config.problem
    if not kind.decodes:
        if problem.new_tokens is None:
            return None
        text = f"got {problem.new_tokens}, but kind {kind.name} computes whole sequences, "
        return Reason("problem.new_tokens", f"{text}expected null")
    assert problem.new_tokens is not None
    if problem.new_tokens >= problem.seq_len:
        text = f"got {problem.new_tokens}, expected fewer than seq_len {problem.seq_len}"
        return Reason("problem.new_tokens", text)
    if isinstance(problem.window, tuple):
        text = f"got {list(problem.window)}, expected null or one number: new tokens are causal"
        return Reason("problem.window", text)
    if (baseline := config.measure.baseline) not in (None, DEFAULT):
        text = f"got {baseline}, expected {DEFAULT} or null: it has a step of decoding"
        return Reason("measure.baseline", text)
    return _fixed(config, _DECODES, "new tokens attend to a sharded context, forward and causally")


def _fixed(
    config: TrialConfig, sections: Mapping[str, Mapping[str, object]], why: str
) -> Reason | None:
    """Prunes other values of fields that a kind fixes."""
    for section, values in sections.items():
        for name, expected in values.items():
            if (value := getattr(getattr(config, section), name)) != expected:
                text = f"got {_written(value)}, expected {_written(expected)}: {why}"
                return Reason(f"{section}.{name}", text)
    return None


def _written(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _too_large(config: TrialConfig) -> Reason | None:
    """Prunes inputs that fit nowhere; all counts of smaller ones fit into 64 bits."""
    problem = config.problem
    rows = config.padded // config.ring.size
    row = problem.kv_heads * (problem.head_dim + problem.value_dim)
    row += problem.heads * problem.head_dim
    row *= DTYPES[problem.dtype].itemsize
    elements = problem.batch * rows * row
    if elements <= RANK_BYTES:
        return None
    return Reason(
        "problem.seq_len",
        f"q, k and v of a rank take {elements >> 40:,} TiB, more than {RANK_BYTES >> 40}; "
        "take shorter sequences, smaller batches or more ranks",
    )


def _unsendable(config: TrialConfig) -> Reason | None:
    """Prunes a transport that does not fit ring and heads, and an impossible walk back."""
    strategy = config.strategy
    try:
        exchange = config.exchange
    except ValueError as error:
        return Reason("strategy.transport", str(error))
    try:
        back = walk.resolve_backward(strategy.backward, strategy.transport, walks=exchange.walks)
        if back == "reverse":  # the mask may forbid it, and the forward pass alone needs it too
            choose_walks(config)
    except walk.Unwalkable as error:
        return Reason("strategy.backward", str(error))
    return None


def interpreted(config: TrialConfig, device: str) -> bool:
    """Tells whether a point on ``device`` runs in Triton's interpreter."""
    return device == "cpu" and config.strategy.backend in INTERPRETED


def unfit(config: TrialConfig, device: str) -> Reason | None:
    """Returns the reason why a point cannot run on ``device`` (cpu, cuda, auto), or None."""
    backend, baseline = config.strategy.backend, config.measure.baseline
    if device == "cpu" and backend in GPU_ONLY:
        return Reason("strategy.backend", f"got {backend}, which runs on GPUs only, on a CPU")
    if reason := _wrong_blocks(config, device) or _too_slow(config, device):
        return reason
    if baseline and (text := BASELINES[baseline].unsupported(config, device)):
        return Reason("measure.baseline", text)
    return None


def _wrong_blocks(config: TrialConfig, device: str) -> Reason | None:
    """Prunes blocks of another backend's kind, and blocks that fit no GPU."""
    blocks, backend = config.cut, config.strategy.backend
    if blocks is None or (backend == "auto" and device == "auto"):
        return None
    resolved = on_device(backend, device)
    named = f"auto ({resolved} on {device})" if backend == "auto" else backend
    text = isinstance(blocks, Blocks)
    if text != (BLOCKS[resolved] == "tiles"):
        kind = "a number of query rows per call" if text else "a text such as 'forward=128x64/8/2'"
        got = f"got {config.strategy.blocks}, backend {named} takes null or {kind}"
        return Reason("strategy.blocks", got)
    return _fits_nowhere(config, blocks) if isinstance(blocks, Blocks) else None


def _fits_nowhere(config: TrialConfig, blocks: Blocks) -> Reason | None:
    for kernel, block in blocks.given.items():
        problem = config.problem.of_kernel(kernel)
        reasons = {name: supports(block, problem, target) for name, target in TARGETS.items()}
        if all(reasons.values()):
            text = f"{kernel}={block} fits no known GPU: {reasons['sm_90']}"
            return Reason("strategy.blocks", text)
    return None


def _too_slow(config: TrialConfig, device: str) -> Reason | None:
    """Prunes problems that are too large for the interpreter."""
    problem, measure = config.problem, config.measure
    if not interpreted(config, device):
        return None
    edges = problem.seq_len * config.ring.size * _TILE_ROWS
    pairs = (problem.visible + edges) * problem.batch * problem.heads
    pairs *= (1 + _BACKWARD_PASSES * problem.has_backward) * (measure.warmup + measure.repeats)
    if pairs <= INTERPRETED_PAIRS:
        return None
    return Reason(
        "problem.seq_len",
        f"backend triton runs on a CPU in Triton's interpreter, which is for small sizes: "
        f"{pairs:.1e} query-key pairs of all heads and passes, more than {INTERPRETED_PAIRS:.1e}; "
        "take shorter lengths, fewer heads or repeats, or GPUs",
    )
