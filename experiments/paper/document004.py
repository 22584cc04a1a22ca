"""Document 004's table: whether a context needs a ring, and of which size; asked of advise.

    python experiments/paper/document004.py

It recommends FlashAttention alone below 32k, sequence parallelism on one node to 256k, a ring on
several nodes to 10M. Its ranks are counted here as the smallest ring that fits, of Llama 3 8B in
training (weights, gradients and optimizer included) with any TP and PP beside it.
"""

from __future__ import annotations

from typing import NamedTuple

from ringray.base import units
from ringray.lab.predict import advise, hardware
from ringray.lab.predict.advise import Proposal
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.report import tables
from ringray.models.sizes import named

K, M = 1 << 10, 1 << 20
# Fleet, context, sequences of a step, and what the document recommends.
ASKED = (
    ("h100:1x8", 16 * K, 8, "flash, one GPU"),
    ("h100:1x8", 128 * K, 8, "flash + sequence parallel, one node"),
    ("h100:8x8", 128 * K, 64, "flash + sequence parallel, one node"),
    ("h100:8x8", M, 4, "ring, several nodes"),
    ("h100:8x8", 10 * M, 1, "ring, several nodes"),
    ("h100:64x8", 10 * M, 1, "ring, several nodes"),
)


class Asked(NamedTuple):
    """One row: the fastest, and the fastest with the smallest ring that fits."""

    fleet: str
    context: int
    recommended: str
    best: Proposal
    smallest: Proposal


def rows() -> list[Asked]:
    """Returns all answers."""
    found = []
    for fleet, context, sequences, recommended in ASKED:
        request = TrainingRequest(named("8b", {}), hardware.parse_fleet(fleet), context, sequences)
        best, smallest = advise.advise(request, 1)[0], advise.smallest_ring(request)
        found.append(Asked(fleet, context, recommended, best, smallest))
    return found


def main() -> None:
    """Prints the table."""
    heads = ("on", "context", "the document", "smallest ring", "x time", "fastest", "by", "step")
    texts = ("on", "the document", "smallest ring", "fastest", "by")
    table = tables.bare_table(*heads, texts=texts)
    for one in rows():
        best, ring, strategy = one.best, one.smallest, one.best.config.strategy
        table.add_row(
            one.fleet, f"{one.context // K:,}k", one.recommended,
            f"CP {ring.degrees.cp}" if ring.degrees.cp > 1 else f"none ({ring.degrees})",
            units.ratio(ring.time.total / best.time.total), str(best.degrees),
            f"{strategy.partition}, {strategy.transport}" * (best.degrees.cp > 1),
            units.duration(best.time.total),
        )  # fmt: skip
    tables.show(table, tables.console())


if __name__ == "__main__":
    main()
