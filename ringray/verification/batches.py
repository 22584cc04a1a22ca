"""The batches of the probes, the same in every process, and what is true of them.

Shape legend: B rows of a batch, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ringray.verification.observation import Array

IGNORED = -100


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of the batches of one target: token ids are below ``vocabulary``."""

    vocabulary: int
    rows: int
    tokens: int


def plain(sizes: BatchSizes) -> dict[str, Array]:
    """Returns a batch of whole sequences, all of whose tokens have labels."""
    return batch(_ids(sizes, sizes.rows, sizes.tokens))


def uneven(sizes: BatchSizes) -> dict[str, Array]:
    """Returns a batch with labels for a third of its tokens: some ranks have many, others few."""
    ids = _ids(sizes, sizes.rows, sizes.tokens)
    labels = ids.copy()
    labels[:, : 2 * sizes.tokens // 3] = IGNORED
    labels[:, sizes.tokens // 2 :: 7] = ids[:, sizes.tokens // 2 :: 7]
    return batch(ids, labels=labels)


def packed(sizes: BatchSizes, rows: int) -> dict[str, Array]:
    """Returns sequences of four documents each; no boundary is at the edge of equal shards."""
    tokens = sizes.tokens
    ends = sorted({tokens // 5 + 1, tokens // 2 + 3, tokens - tokens // 7, tokens})
    return batch(_ids(sizes, rows, tokens), documents=(0, *ends))


def padded(sizes: BatchSizes) -> dict[str, Array]:
    """Returns a batch whose length no number of ranks divides."""
    return batch(_ids(sizes, sizes.rows, sizes.tokens - 1))


def labelled(whole: dict[str, Array], rows: Array) -> dict[str, Array]:
    """Returns a batch in which only the tokens in some rows, places in the flattened batch, predict
    anything."""
    ids = whole["input_ids"]
    predicted = rows[(rows >= 0) & (rows % ids.shape[1] < ids.shape[1] - 1)] + 1
    labels = np.full_like(ids, IGNORED)
    labels.flat[predicted] = ids.flat[predicted]
    return batch(ids, labels=labels)


def batch(
    ids: Array, *, labels: Array | None = None, documents: Iterable[int] | None = None
) -> dict[str, Array]:
    """Returns the tensors of a batch.

    ``input_ids``, ``labels`` (not shifted), ``shift_labels`` (of the next token, within documents)
    and ``position_ids`` (from 0 in each document), each int64 (B, S); with documents
    ``cu_seqlens``, int32.
    """
    labels = ids.copy() if labels is None else labels.copy()
    ends = [0, ids.shape[1]] if documents is None else [*documents]
    following = np.full_like(labels, IGNORED)
    following[:, :-1] = labels[:, 1:]
    positions = np.zeros_like(ids)
    for begin, end in pairwise(ends):
        # The last token of a document predicts nothing.
        following[:, end - 1] = IGNORED
        # Models that shift labels themselves do not see where documents begin.
        if begin:
            labels[:, begin] = IGNORED
        positions[:, begin:end] = np.arange(end - begin)
    tensors = {"input_ids": ids, "labels": labels, "shift_labels": following}
    tensors["position_ids"] = positions
    if documents is not None:
        tensors["cu_seqlens"] = np.array(ends, dtype=np.int32)
    return tensors


def columns(whole: dict[str, Array], chosen: Array) -> dict[str, Array]:
    """Returns a batch of some columns of another, with their positions, as one document."""
    # Contiguous, for models that look at a batch by .view().
    return {name: x[:, chosen].copy("C") for name, x in whole.items() if x.ndim == 2}


def documents(whole: dict[str, Array]) -> list[dict[str, Array]]:
    """Returns a batch of each document."""
    return [
        columns(whole, np.arange(begin, end))
        | {"cu_seqlens": np.array([0, end - begin], dtype=np.int32)}
        for begin, end in pairwise(whole["cu_seqlens"].tolist())
    ]


def changed(whole: dict[str, Array], token: int) -> dict[str, Array]:
    """Returns a batch in which one token of each row is another one; labels stay."""
    ids = whole["input_ids"].copy()
    ids[:, token] = np.where(ids[:, token] == ids.max(), ids.min(), ids.max())
    return whole | {"input_ids": ids}


def document_of(whole: dict[str, Array]) -> Array:
    """Returns the number of each position's document, (S,)."""
    size = whole["input_ids"].shape[1]
    ends = whole.get("cu_seqlens", np.array([0, size]))
    return np.searchsorted(ends, np.arange(size), side="right") - 1


def _ids(sizes: BatchSizes, rows: int, tokens: int) -> Array:
    # The first tokens of a vocabulary are often special ones.
    low = min(8, sizes.vocabulary // 2)
    generator = np.random.default_rng(0)
    return generator.integers(low, sizes.vocabulary, (rows, tokens), dtype=np.int64)
