"""Methods of search: which points of a sweep are measured, in which order, and how often.

base     what a method is given, asks and is told
grid     every point
random   points drawn at random
halving  the points that may be the best, the better ones more often
optuna   what Optuna's sampler proposes
bisect   the largest point that works

To add one, write ``ringray/lab/search/<name>.py`` beside the others with a generator (see
``base.Search``) and its ``METHOD``, and add it to ``METHODS``. The contract suite in
``tests/contracts/test_search.py`` then runs over it. Imports neither torch nor ray; a method that
needs a library imports it when it is asked to search.
"""

from __future__ import annotations

from ringray.lab.search import bisect, grid, halving, optuna, random
from ringray.lab.search.base import Method

METHODS: dict[str, Method] = {
    "grid": grid.METHOD,
    "random": random.METHOD,
    "halving": halving.METHOD,
    "optuna": optuna.METHOD,
    "bisect": bisect.METHOD,
}
