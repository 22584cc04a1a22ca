"""The training of a model, and whether it fits ranks of each kind. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ringray import partition as partitions
from ringray import transport as transports
from ringray.base.errors import reason_of
from ringray.models.sizes import Kept, Model, Scores


@dataclass(frozen=True)
class Degrees:
    """Ranks of each kind of parallelism: data, context (the ring), tensor, pipeline."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Returns the ranks of all together."""
        return self.dp * self.cp * self.tp * self.pp

    def __str__(self) -> str:
        return f"DP {self.dp} x CP {self.cp} x TP {self.tp} x PP {self.pp}"


@dataclass(frozen=True)
class Recipe:
    """The training of a model.

    ``seq_len``: tokens of a sequence. ``sequences``: of a step, ``micro_batch`` of them at once.
    ``steps``: of the whole training: the learning rate rises for ``warmup`` of them and then falls
    to a tenth along a cosine. ``clip``: largest norm of the gradients. ``documents``: tokens see
    their own document only. ``dtype``: of computation; weights and optimizer are in fp32. The
    others are options of the ``Decoder``.
    """

    seq_len: int
    sequences: int = 1
    micro_batch: int = 1
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
    partition: str = partitions.DEFAULT
    transport: str = transports.DEFAULT
    rope_theta: float = 10000.0


def check(model: Model, degrees: Degrees, recipe: Recipe) -> None:
    """Raises ValueError, which names the field, if a model cannot be trained so."""
    if recipe.sequences % degrees.dp:
        raise ValueError(
            f"dp: got {degrees.dp}, expected a divisor of sequences = {recipe.sequences}"
        )
    if (recipe.sequences // degrees.dp) % recipe.micro_batch:
        raise ValueError(
            f"micro_batch: got {recipe.micro_batch}, expected a divisor of the sequences of a "
            f"replica = {recipe.sequences // degrees.dp}"
        )
    if recipe.micro_batch > 1 and (recipe.documents or degrees.pp > 1):
        raise ValueError(
            f"micro_batch: got {recipe.micro_batch}, expected 1 with documents or stages"
        )
    if degrees.pp > model.layers:
        raise ValueError(f"pp: got {degrees.pp}, expected at most layers = {model.layers}")
    if degrees.pp > 1 and recipe.sequences // degrees.dp < degrees.pp:
        raise ValueError(
            f"pp: got {degrees.pp} stages, expected at most as many as sequences of a replica: "
            f"{recipe.sequences // degrees.dp}"
        )
    check_split(model, degrees.tp)
    rows = partitions.padded_length(recipe.partition, recipe.seq_len, degrees.cp) // degrees.cp
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
    if not model.gated or model.head_dim % 2:
        raise ValueError(f"model: {model.name} has no gated MLP, or an odd head dim")
    if recipe.scores == "whole" and (degrees.cp > 1 or recipe.documents):
        raise ValueError("scores: whole scores need cp 1 and documents: false")
    if recipe.scores == "whole" and recipe.kept == "attention":
        raise ValueError("kept: got 'attention', expected 'all' or 'input' with whole scores")


def check_split(model: Model, tp: int) -> None:
    """Raises ValueError if ``tp`` ranks cannot split a model."""
    for name in ("heads", "kv_heads", "intermediate", "vocab"):
        if getattr(model, name) % tp:
            whole = getattr(model, name)
            raise ValueError(f"tp: got {tp}, expected a divisor of {name} = {whole}")
