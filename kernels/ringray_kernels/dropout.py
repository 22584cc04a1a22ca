"""Dropout of attention weights by a seed and by where a weight stands, and by nothing else.

Whether the weight of query position i and key position j stays, in head h of batch row b, is said
by one of the four numbers of Philox4x32 (Salmon et al., 2011, with 7 rounds) of the key ``seed``
and the counter (j / 4, i, h, b): by number j mod 4. So it depends on no shard, partition, order of
hops, block or backend, and backward makes it again. The log-sum-exp is that of all weights; those
that stay are divided by their share 1 - p, so delta remains rowsum(dout * out).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 7
SEEDS = 1 << 62  # from 0 on
POSITIONS = 1 << 31  # of one sequence
_BITS = 31  # of a number that are compared
_WORD = (1 << 32) - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


class Dropout(NamedTuple):
    """Weights that are dropped: a share of ``p``. ``head``, ``batch``: of the first ones of the
    tensors at hand, among all heads and batch rows."""

    p: float
    seed: int
    head: int = 0
    batch: int = 0

    @property
    def least(self) -> int:
        """Returns the least number, of 31 bits, of a weight that stays."""
        return min(round(self.p * (1 << _BITS)), (1 << _BITS) - 1)

    @property
    def words(self) -> tuple[int, int]:
        """Returns the seed as two words of 32 bits."""
        return self.seed & _WORD, self.seed >> 32


def unusable_dropout(p: object, seed: object) -> str | None:
    """Returns why weights cannot be dropped with probability ``p`` and ``seed``, or None."""
    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p < 1:
        return f"dropout_p: got {p!r}, expected a number of at least 0 and below 1"
    whole = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < SEEDS
    if seed is not None and not whole:
        return f"dropout_seed: got {seed!r}, expected None or an integer from 0 to 2 ** 62 - 1"
    return None


def factors(dropout: Dropout, batch: Tensor, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Returns the factors of weights, 0 or 1 / (1 - p), fp32 (..., Sq, Sk), of ``batch`` rows and
    ``heads``, int64 (...), at the global positions ``rows`` (Sq,) and ``keys`` (Sk,)."""
    quads, place = torch.unique(keys.long() >> 2, return_inverse=True)
    counter = (
        quads,
        rows.long()[:, None],
        (heads + dropout.head)[..., None, None],
        (batch + dropout.batch)[..., None, None],
    )
    numbers = _philox(counter, dropout.words)
    stays = torch.stack([(x >> 1) >= dropout.least for x in numbers], -1).flatten(-2)
    stays = stays.index_select(-1, place * 4 + (keys.long() & 3))
    return stays.to(torch.float32).div_(1 - dropout.p)


def _philox(counter: tuple[Tensor, ...], key: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Returns four numbers of 32 bits, int64, of the four words of a counter, which broadcast."""
    for _ in range(ROUNDS):
        first, third = (x * m for x, m in zip(counter[::2], _MULTIPLIERS, strict=True))
        counter = (
            (third >> 32 & _WORD) ^ counter[1] ^ key[0],
            third & _WORD,
            (first >> 32 & _WORD) ^ counter[3] ^ key[1],
            first & _WORD,
        )
        key = tuple((x + increment) & _WORD for x, increment in zip(key, _INCREMENTS, strict=True))
    return counter
