"""``bisect``: finds the largest point that works, such as the longest context that fits.

Points are in the order of their choices. It begins with the largest one, the last that the
prediction admits, goes down in steps that double until one works, and halves what lies between.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringray.lab.search.base import Candidate, Method, Request, Search, SearchSettings


def search(candidates: Sequence[Candidate], settings: SearchSettings) -> Search:
    """Asks for one point a round."""
    order = sorted(candidates, key=lambda point: [value for _, value in point.choices])
    works, fails, step = -1, len(order), 1
    while fails - works > 1:
        middle = (works + fails) // 2 if works >= 0 else max(0, fails - step)
        asked = order[middle].key
        response = (yield [Request(asked, settings.repeats)])[asked]
        works, fails = (middle, fails) if response.scores is not None else (works, middle)
        step *= 2


METHOD = Method(search, "the largest point that works", extreme=True)
