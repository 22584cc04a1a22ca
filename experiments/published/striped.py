"""The six ratios of striped to contiguous rows of the paper on Striped Attention, predicted.

    python experiments/published/striped.py

A rank computes blocks tile by tile and skips tiles without a visible pair: of contiguous rows only
in its own block, of striped rows in all. Products beside attention take the same time in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FACTS = Path(__file__).with_name("striped-attention.yaml")
CONTEXT = 262144
# Products of attention and the others' passes, forward, again and backward: of attention two, two
# and five for two forward; the others four for one.
ATTENTION, OTHERS = 9 / 2, 4


class Ratio(NamedTuple):
    """The speedup of one model on one device."""

    device: str
    model: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Returns the relative error of what is predicted."""
        return self.predicted / self.published - 1


class Work(NamedTuple):
    """Tiles of a rank: computed and skipped, of contiguous rows on the last rank and of striped
    rows; ``others``: the products beside attention, as so many tiles."""

    contiguous: tuple[int, int]
    striped: tuple[int, int]
    others: float

    def ratio(self, skipping: float) -> float:
        """Returns the time of contiguous over that of striped rows; ``skipping``: time of a tile
        that is skipped over that of one that is computed."""
        times = (done + skipping * skipped + self.others for done, skipped in self[:2])
        return next(times) / next(times)


def work(ranks: int, context: int, tile: list[int], width: float) -> Work:
    """Returns the work of a rank; ``width``: parameters of a layer over the model's width, over the
    relative time of attention's FLOPs."""
    block = context // ranks
    high, long = (block // side for side in tile)
    # A tile is computed whose last query comes after its first key.
    own = sum(
        tile[0] * (row + 1) > tile[1] * column for row in range(high) for column in range(long)
    )
    every = high * long
    of_tile = ATTENTION * 4 * tile[0] * tile[1]
    others = OTHERS * 2 * width * block / of_tile
    contiguous = own + (ranks - 1) * every, every - own
    return Work(contiguous, (ranks * own, ranks * (every - own)), others)


def skipping(of: Work, published: float) -> float:
    """Returns what skipping a tile costs by a published ratio."""
    (done, few), (striped, many) = of[:2]
    spent = done + of.others - published * (striped + of.others)
    return spent / (published * many - few)


def ratios() -> list[Ratio]:
    """Returns all six."""
    facts: dict[str, Any] = yaml.safe_load(FACTS.read_text(encoding="utf-8"))

    def of(device: Mapping[str, Any], model: str, ranks: int, context: int) -> Work:
        hidden, inside = facts["models"][model]
        return work(ranks, context, device["tile"], (4 * hidden + 3 * inside) / device["slower"])

    rows = []
    for device in facts["devices"]:
        other = device["other"]
        cost = skipping(
            of(device, other["model"], other["ranks"], other["context"]), other["published"]
        )
        for model, published in device["published"].items():
            ratio = of(device, model, device["ranks"], CONTEXT).ratio(cost)
            rows.append(Ratio(device["device"], model, published, ratio))
    return rows


def lines() -> list[str]:
    """Returns a line for each ratio: published, predicted, error."""
    return [
        f"{ratio.device}, {ratio.model} | {ratio.published:.2f} {ratio.predicted:.2f} "
        f"{ratio.error:+.1%}"
        for ratio in ratios()
    ]


def main() -> None:
    """Prints all ratios."""
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
