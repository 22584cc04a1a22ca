"""``grid``: measures every point in full."""

from __future__ import annotations

from collections.abc import Sequence

from ringray.lab.search.base import Candidate, Method, Request, Search, SearchSettings


def search(candidates: Sequence[Candidate], settings: SearchSettings) -> Search:
    """Asks for all points in one round."""
    yield [Request(candidate.key, settings.repeats) for candidate in candidates]


METHOD = Method(search, "all points", exhaustive=True)
