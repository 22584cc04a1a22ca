"""The rectangles that all visible pairs of a mask lie in. Imports numpy only."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.traffic.mask import Mask

Ints = NDArray[np.int64]


class Areas(NamedTuple):
    """Rectangles of the mask, which have no pair in common: queries ``[query, query_stop)`` see the
    keys of ``[key, key_stop)`` with ``least <= query - key <= most``; arrays (areas,)."""

    query: Ints
    query_stop: Ints
    key: Ints
    key_stop: Ints
    least: Ints
    most: Ints


@lru_cache(maxsize=32)
def areas(mask: Mask) -> Areas:
    """Returns the squares of prefixes, or the column of a shared prefix, or the columns and rows of
    global tokens, and what follows them, document by document and chunk by chunk."""
    if mask.plain:
        far = mask.seq_len
        return Areas(*np.array([[0], [far], [0], [far], [0 if mask.causal else -far], [far]]))
    bounds = np.array(mask.boundaries, np.int64)
    begin, end = bounds[:-1], bounds[1:]
    after = np.minimum(begin + np.array(mask.global_tokens or mask.prefixes), end)
    chunk = mask.chunk or mask.seq_len
    count = -((begin - end) // chunk)
    index = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
    key = np.repeat(begin, count) + index * chunk
    stop = np.minimum(key + chunk, np.repeat(end, count))
    left, right = mask.window if isinstance(mask.window, tuple) else (mask.window, None)
    far = mask.seq_len  # further than any key from any query
    least = 0 if mask.causal else -far if right is None else -min(right, far)
    most = far if left is None else min(left, far)
    query = np.maximum(key, np.repeat(after, count))
    back = 0 if mask.causal else -far
    if mask.shared_prefix is not None:
        tokens = min(mask.shared_prefix, mask.seq_len)
        column = (begin[:1], mask.seq_len, 0, tokens, back, far)
        parts = [column, (key, stop, np.maximum(key, tokens), stop, least, most)]
    elif mask.global_tokens is None:
        parts = [(begin, after, begin, after, -far, far), (query, stop, key, stop, least, most)]
    else:
        columns = (begin, end, begin, after, back, far)
        parts = [columns, (query, stop, query, stop, least, most)]
        if not mask.causal:
            parts.append((begin, after, after, end, -far, far))
    rectangles = np.concatenate([np.array(np.broadcast_arrays(*part)) for part in parts], 1)
    return Areas(*rectangles[:, (rectangles[0] < rectangles[1]) & (rectangles[2] < rectangles[3])])
