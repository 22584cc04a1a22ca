"""Methods of search: which points of a sweep are measured, in which order, and how often.

To add one, write ``ringray/autotune/<name>.py`` beside the others with a generator ``search`` (see
``base.Search``) and the names of the options it takes, and add its name to ``METHODS``. The
contract suite in ``tests/contracts/test_search.py`` then runs over it. Imports neither torch nor
ray; a method that needs a library imports it when it is asked to search.
"""

from __future__ import annotations

from ringray.lab.search.base import Candidate, SearchSettings, Told, load

METHODS: dict[str, str] = {
    "grid": "ringray.lab.search.grid",
    "random": "ringray.lab.search.random",
    "halving": "ringray.lab.search.halving",
    "optuna": "ringray.lab.search.optuna",
}

__all__ = ["METHODS", "Candidate", "SearchSettings", "Told", "load"]
