"""``random``: measures points in full, drawn without replacement up to the budget."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ringray.lab.search.base import Candidate, Method, Request, Search, SearchSettings


def search(candidates: Sequence[Candidate], settings: SearchSettings) -> Search:
    """Asks for all its points in one round."""
    count = settings.runs(len(candidates)) // (settings.warmup + settings.repeats)
    drawn = random.Random(settings.seed).sample(list(candidates), min(count, len(candidates)))
    yield [Request(candidate.key, settings.repeats) for candidate in drawn]


METHOD = Method(search, "a random sample", ("budget", "seed"))
