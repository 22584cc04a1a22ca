"""The section ``training`` of a spec. Imports neither torch nor ray."""

from __future__ import annotations

from typing import Annotated, get_args

from ringray.base.redaction import UNPRINTABLE
from ringray.lab.specs.fields import (
    BASE,
    RATE,
    Fields,
    Ints,
    IntsOrNull,
    Names,
    NamesOrNull,
    Several,
    one_of,
    or_null,
    text,
    tokens,
    whole,
)
from ringray.models import sizes

_PATH = text(rf"[^{UNPRINTABLE}\t\n]+", "a path", 4096)


class TrainSection(Fields):
    """The training of kind train: a model, its place on the ranks, and its data. ``problem`` has
    the tokens of a sequence, the sequences of a step (``batch``) and the type of computation."""

    model: Annotated[Names, Several(one_of(sizes.table()))] = "llama-tiny"
    """Sizes of the model."""
    layers: Annotated[int | None, or_null(whole(1, 1024), "the model's")] = None
    """Layers. null: the model's, as for the sizes below."""
    hidden: Annotated[int | None, or_null(whole(1, 1 << 18), "the model's")] = None
    """Features of a token."""
    heads: Annotated[int | None, or_null(whole(1, 1024), "the model's")] = None
    """Query heads."""
    kv_heads: Annotated[int | None, or_null(whole(1, 1024), "the model's")] = None
    """K/V heads."""
    head_dim: Annotated[int | None, or_null(whole(2, 512), "the model's")] = None
    """Size of one head, in elements."""
    intermediate: Annotated[int | None, or_null(whole(1, 1 << 20), "the model's")] = None
    """Features inside the MLP."""
    vocab: Annotated[int | None, or_null(whole(2, 1 << 22), "the model's")] = None
    """Tokens of the vocabulary."""
    dp: Annotated[Ints, Several(whole(1, 4096))] = 1
    """Replicas, each with its share of the sequences of a step. The ring (CP) has the ranks that
    dp, tp and pp leave of ring.size."""
    tp: Annotated[Ints, Several(whole(1, 64))] = 1
    """Ranks among which heads and MLP are split (tensor parallelism)."""
    pp: Annotated[Ints, Several(whole(1, 256))] = 1
    """Stages of layers (pipeline parallelism)."""
    rope_theta: Annotated[float, BASE] = 10000.0
    """Base of the rotary embedding: the slowest pair of a head of D turns by rope_theta**(2/D - 1)
    a token. Longer contexts want a larger one."""
    scores: Annotated[Names, Several(one_of(get_args(sizes.Scores)))] = "blockwise"
    """whole: attention keeps the matrix of its scores, for comparison; without a ring."""
    mlp_rows: Annotated[IntsOrNull, Several(or_null(tokens(1, 2**31 - 1), "all, and kept"))] = 1024
    """Rows of the MLP at once, computed again in backward (blockwise). null: all, and kept."""
    kept: Annotated[Names, Several(one_of(get_args(sizes.Kept)))] = "input"
    """Tensors that a layer keeps for its backward pass: all; its input and the result of attention,
    so the ring does not run again; its input alone."""
    micro_batch: Annotated[int, whole(1, 4096)] = 1
    """Sequences of a replica that are computed at once; more than one without documents only."""
    steps: Annotated[int, whole(1, 1_000_000)] = 20
    """Steps of the training."""
    learning_rate: Annotated[float, RATE] = 1e-3
    """Learning rate after the first tenth of the steps; it falls to a tenth of it."""
    corpus: Annotated[NamesOrNull, Several(or_null(_PATH, "random tokens"))] = None
    """Files or folders of text or of .npy arrays of tokens; of a list all. null: random tokens."""
    tokenizer: Annotated[str | None, or_null(_PATH, "bytes")] = None
    """Folder of a Hugging Face tokenizer. null: each byte of text is a token."""
    examined: Annotated[
        IntsOrNull, Several(or_null(tokens(1, 2**31 - 1), "that of the training"))
    ] = None
    """Lengths of the sequences in which a task is examined after its training; of a list all. null:
    that of the training."""
    checkpoints: Annotated[str | None, or_null(_PATH, "none")] = None
    """Folder of checkpoints, which all ranks see; a training whose folder has one goes on from it,
    on any ranks. It needs a spec of one point. null: none."""
    save_every: Annotated[int, whole(1, 1_000_000)] = 100
    """Steps between checkpoints."""
