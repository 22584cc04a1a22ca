"""The training of a model, and whether it fits ranks of each kind. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ringray import partition as partitions
from ringray import transport as transports
from ringray.base.errors import reason_of
from ringray.models.sizes import Kept, Model, Scores


@dataclass(frozen=True)
class Degrees:
    """Ranks of each kind of parallelism: data, context (the ring), tensor, pipeline. ``ep``: ranks
    of DP x CP among which experts are dealt, in predictions."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Returns the ranks of all together."""
        return self.dp * self.cp * self.tp * self.pp

    def __str__(self) -> str:
        experts = f", EP {self.ep}" * (self.ep > 1)
        return f"DP {self.dp} x CP {self.cp} x TP {self.tp} x PP {self.pp}{experts}"


# Options of a model, and their defaults where sequences are pooled.
POOLED = {"partition": partitions.BALANCED, "transport": transports.DEALT}
_ALONE = {"partition": partitions.DEFAULT, "transport": transports.DEFAULT}


@dataclass(frozen=True)
class Recipe:
    """The training of a model.

    ``seq_len``: tokens of a sequence. ``sequences``: of a step, ``micro_batch`` of them at once.
    ``pool``: sequences that are joined into one, whose documents choose their ring among all ranks;
    a document that goes on in the next sequence of the pool is not cut. ``steps``: of the whole
    training: the learning rate rises for ``warmup`` of them and then falls to a tenth along a
    cosine. ``clip``: largest norm of the gradients. ``documents``: tokens see their own document
    only; without it sequences are the documents. ``dtype``: of computation; weights and optimizer
    are in fp32. ``offload``: inputs of layers leave the device until their backward
    pass. The others are options of the ``Decoder``; ``partition`` and ``transport`` are balanced
    and direct by default in a pool, else zigzag and ring.
    """

    seq_len: int
    sequences: int = 1
    micro_batch: int = 1
    pool: int = 1
    steps: int = 100
    learning_rate: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    documents: bool = True
    dtype: str = "float32"
    seed: int = 0
    scores: Scores = "blockwise"
    mlp_rows: int | None = 1024
    loss_rows: int | None = 1024
    kept: Kept = "input"
    offload: bool = False
    partition: str = ""
    transport: str = ""
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for name, default in (POOLED if self.pool > 1 else _ALONE).items():
            object.__setattr__(self, name, getattr(self, name) or default)


def check(model: Model, degrees: Degrees, recipe: Recipe) -> None:
    """Raises ValueError, which names the field, if a model cannot be trained so."""
    if recipe.sequences % degrees.dp:
        raise ValueError(
            f"dp: got {degrees.dp}, expected a divisor of sequences = {recipe.sequences}"
        )
    share = recipe.sequences // degrees.dp
    for name in ("micro_batch", "pool"):
        if share % (size := getattr(recipe, name)):
            raise ValueError(
                f"{name}: got {size}, expected a divisor of the sequences of a replica = {share}"
            )
    if recipe.micro_batch > 1 and (recipe.documents or degrees.pp > 1 or recipe.pool > 1):
        raise ValueError(
            f"micro_batch: got {recipe.micro_batch}, expected 1 with documents, stages or a pool"
        )
    if degrees.pp > 1 and (recipe.pool > 1 or recipe.partition == partitions.BALANCED):
        raise ValueError(
            f"pp: got {degrees.pp} stages, expected 1 with a pool or partition "
            f"{partitions.BALANCED}, which deal each micro-batch anew"
        )
    if degrees.pp > model.layers:
        raise ValueError(f"pp: got {degrees.pp}, expected at most layers = {model.layers}")
    if degrees.pp > 1 and share < degrees.pp:
        raise ValueError(
            f"pp: got {degrees.pp} stages, expected at most as many as sequences of a replica: "
            f"{share}"
        )
    check_split(model, degrees.tp)
    joined = recipe.pool * recipe.seq_len
    rows = partitions.padded_length(recipe.partition, joined, degrees.cp) // degrees.cp
    if rows % degrees.tp:
        raise ValueError(
            f"seq_len: got {recipe.seq_len}, whose {rows} rows of a rank are no multiple of tp = "
            f"{degrees.tp}"
        )
    try:
        transports.plan(
            recipe.transport, degrees.cp, model.heads // degrees.tp, model.kv_heads // degrees.tp
        )
    except ValueError as error:
        raise ValueError(f"transport: {reason_of(error)}") from None
    check_layers(model)
    if not model.gated or model.head_dim % 2:
        raise ValueError(f"model: {model.name} has no gated MLP, or an odd head dim")
    if recipe.scores == "whole" and (degrees.cp > 1 or recipe.documents or recipe.pool > 1):
        raise ValueError("scores: whole scores need cp 1, no pool and documents: false")
    if recipe.offload and recipe.kept == "all":
        raise ValueError("offload: got true with kept: all, expected kept: input or attention")
    if recipe.scores == "whole" and recipe.kept == "attention":
        raise ValueError("kept: got 'attention', expected 'all' or 'input' with whole scores")


def check_layers(model: Model) -> None:
    """Raises ValueError if a model has other layers than ``Decoder``."""
    if model.mixed:
        raise ValueError(
            f"model: {model.name} has {', '.join(model.unlike) or 'layers of several kinds'}; "
            "expected layers that are all alike, with full attention and one MLP"
        )


def check_split(model: Model, tp: int) -> None:
    """Raises ValueError if ``tp`` ranks cannot split a model."""
    for name in ("heads", "kv_heads", "intermediate", "vocab"):
        if (whole := getattr(model, name)) % tp:
            raise ValueError(f"tp: got {tp}, expected a divisor of {name} = {whole}")
