"""``grid``: measures every point in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringray.lab.search.base import Ask, Method

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.lab.search.base import Candidate, Search, SearchSettings


def search(candidates: Sequence[Candidate], settings: SearchSettings) -> Search:
    """Asks for all points in one round."""
    yield [Ask(candidate.key, settings.repeats) for candidate in candidates]


METHOD = Method(search, "all points", exhaustive=True)
