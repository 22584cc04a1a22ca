"""The definitions, spelled out row by row: what the closed forms are compared with."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from ringray.partition import PARTITIONS, padded_length
from ringray.traffic.geometry import Mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


@lru_cache(maxsize=4096)
def seen(mask: Mask, padded: int) -> NDArray[np.bool_]:
    """(padded, padded): whether the query at row's position sees the key at column's."""
    table = np.zeros((padded, padded), bool)
    document = np.zeros(mask.seq_len, int)
    for index, (begin, end) in enumerate(itertools.pairwise(mask.boundaries)):
        document[begin:end] = index
    for p in range(mask.seq_len):
        for k in range(mask.seq_len):
            table[p, k] = (
                document[p] == document[k]
                and (not mask.causal or k <= p)
                and (mask.window is None or k >= p - mask.window)
            )
    return table


def rows(name: str, padded: int, ranks: int) -> list[NDArray[np.int64]]:
    """Each rank's positions, in the order of its rows."""
    return [
        np.array(sorted(itertools.chain(*PARTITIONS[name].ranges(padded, ranks, rank))), np.int64)
        for rank in range(ranks)
    ]


def blocks(
    name: str, padded: int, ranks: int, mask: Mask
) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """(query rank, key rank, which of its rows each query row sees) for all pairs of ranks."""
    table, dealt = seen(mask, padded), rows(name, padded, ranks)
    for query, key in itertools.product(range(ranks), repeat=2):
        yield query, key, table[np.ix_(dealt[query], dealt[key])]


def masks(seq_len: int) -> list[Mask]:
    """A mask of each kind for a length, and intersections of them."""
    cuts = sorted({0, seq_len // 5, seq_len // 2, seq_len // 2, (3 * seq_len) // 4, seq_len})
    packed = (0, 0, *cuts[1:], seq_len)
    found = [Mask(seq_len, causal=False), Mask(seq_len), Mask(seq_len, False, None, packed)]
    for window in (0, 1, 3, seq_len // 2, seq_len + 5):
        found += [Mask(seq_len, True, window), Mask(seq_len, True, window, packed)]
    return [*found, Mask(seq_len, True, None, packed)]


@st.composite
def problems(draw: st.DrawFn, longest: int = 40, most: int = 6) -> tuple[str, int, int, Mask]:
    """(partition, padded length, ranks, mask)."""
    name = draw(st.sampled_from(sorted(PARTITIONS)))
    ranks = draw(st.integers(1, most))
    seq_len = draw(st.integers(1, longest))
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(0, longest)) if causal else None
    cuts = draw(st.none() | st.lists(st.integers(0, seq_len), max_size=5))
    documents = None if cuts is None else (0, *sorted(cuts), seq_len)
    mask = Mask(seq_len, causal, window, documents)
    return name, padded_length(name, seq_len, ranks), ranks, mask
