"""The definitions, spelled out row by row: what the closed forms are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringray.partition import BALANCED, NAMES, Partitioning, get, padded_length
from ringray.traffic.deal import deal
from ringray.traffic.mask import Mask


@lru_cache(maxsize=4096)
def seen(mask: Mask, padded: int) -> NDArray[np.bool_]:
    """(padded, padded): whether the query at row's position sees the key at column's."""
    table = np.zeros((padded, padded), bool)
    window, chunk = mask.window, mask.chunk or mask.seq_len
    left, right = window if isinstance(window, tuple) else (window, None)
    prefixes = mask.prefix or (0,)
    for index, (begin, end) in enumerate(itertools.pairwise(mask.boundaries)):
        prefix = prefixes[index] if len(prefixes) > 1 else prefixes[0]
        first = mask.global_tokens or 0
        for p, k in itertools.product(range(end - begin), repeat=2):
            near = (left is None or k >= p - left) and (right is None or k <= p + right)
            local = near and p // chunk == k // chunk
            everyone = k < first or (p < first and not mask.causal)
            allowed = (local or everyone) and (not mask.causal or k <= p)
            table[begin + p, begin + k] = (p < prefix and k < prefix) or allowed
    for p, k in itertools.product(range(mask.seq_len), range(mask.shared_prefix or 0)):
        if k < mask.seq_len and (k <= p or not mask.causal):
            table[p, k] = True
    return table


def rows(name: Partitioning, padded: int, ranks: int) -> list[NDArray[np.int64]]:
    """Each rank's positions, in the order of its rows."""
    return [
        np.array(sorted(itertools.chain(*get(name).ranges(padded, ranks, rank))), np.int64)
        for rank in range(ranks)
    ]


def blocks(
    name: Partitioning, padded: int, ranks: int, mask: Mask
) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """(query rank, key rank, which of its rows each query row sees) for all pairs of ranks."""
    table, dealt = seen(mask, padded), rows(name, padded, ranks)
    for query, key in itertools.product(range(ranks), repeat=2):
        yield query, key, table[np.ix_(dealt[query], dealt[key])]


def masks(seq_len: int) -> list[Mask]:
    """A mask of each kind for a length, and intersections of them."""
    ends = sorted({0, seq_len // 5, seq_len // 2, seq_len // 2, (3 * seq_len) // 4, seq_len})
    packed = (0, 0, *ends[1:], seq_len)
    found = [Mask(seq_len, causal=False), Mask(seq_len), Mask(seq_len, False, None, packed)]
    for window in (0, 1, 3, seq_len // 2, seq_len + 5):
        found += [Mask(seq_len, True, window), Mask(seq_len, True, window, packed)]
    for both in ((0, 0), (2, None), (None, 1), (1, 3), (seq_len // 3, seq_len + 5)):
        found += [Mask(seq_len, False, both), Mask(seq_len, False, both, packed)]
    for chunk, prefix in ((1, 2), (3, None), (4, 3), (None, 2), (seq_len, seq_len // 2)):
        one = None if prefix is None else (prefix,)
        each = None if prefix is None else tuple((prefix * i) % 5 for i in range(len(packed) - 1))
        found += [
            Mask(seq_len, prefix is not None, None, packed, chunk),
            Mask(seq_len, True, None, None, chunk, one),
            Mask(seq_len, True, 2, packed, chunk, each),
        ]
    for tokens, window, chunk in ((1, 2, None), (3, 1, 4), (2, None, 5), (seq_len + 1, 3, None)):
        sides = window if window is None else (window, seq_len // 4)
        for cuts in (None, packed):
            found += [
                Mask(seq_len, True, window, cuts, chunk, None, tokens),
                Mask(seq_len, False, sides, cuts, chunk, None, tokens),
            ]
    return [*found, Mask(seq_len, True, None, packed)]


@st.composite
def problems(
    draw: st.DrawFn, longest: int = 40, most: int = 6
) -> tuple[Partitioning, int, int, Mask]:
    """(partition, padded length, ranks, mask); a partition of its own is dealt for the mask."""
    name = draw(st.sampled_from(sorted(NAMES)))
    ranks = draw(st.integers(1, most))
    mask = draw(any_mask(draw(st.integers(1, longest))))
    rule = deal(mask, ranks) if name == BALANCED else name
    return rule, padded_length(rule, mask.seq_len, ranks), ranks, mask


@st.composite
def any_mask(draw: st.DrawFn, seq_len: int) -> Mask:
    """Any mask of a length."""
    side = st.none() | st.integers(0, seq_len + 5)
    causal = draw(st.booleans())
    window = draw(side if causal else st.none() | st.tuples(side, side))
    cuts = draw(st.none() | st.lists(st.integers(0, seq_len), max_size=5))
    documents = None if cuts is None else (0, *sorted(cuts), seq_len)
    chunk = draw(st.none() | st.integers(1, seq_len + 5))
    count = 1 if documents is None else len(documents) - 1
    prefix = None
    if causal:
        lengths = st.integers(0, seq_len + 5)
        lists = st.lists(lengths, min_size=1, max_size=1) | st.lists(
            lengths, min_size=count, max_size=count
        )
        prefix = draw(st.none() | lists.map(tuple))
    one = Mask(seq_len, causal, window, documents, chunk, prefix)
    local = (one.window is not None or one.chunk is not None) and one.prefix is None
    tokens = draw(st.none() | st.integers(1, seq_len + 5))
    if local and draw(st.booleans()):
        return replace(one, global_tokens=tokens)
    limited = local or (one.documents is not None and one.prefix is None)
    return replace(one, shared_prefix=tokens) if limited else one
