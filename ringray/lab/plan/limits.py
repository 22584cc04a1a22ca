"""How large a plan may be: a spec of a few lines can ask for more points than there are seconds.

What is counted is known before anything of that size is made. Imports neither torch nor ray.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ringray.base.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ringray.lab.spec.model import Spec
    from ringray.lab.trial.config import TrialConfig

MOST_POINTS = 100_000
MOST_DOCUMENTS = 20_000_000  # boundaries of documents, of all points
MOST_WORK = 4_000_000_000  # elements of the planner's tables; 20 million take about a second
_TABLES = 16  # of ranks x ranks, that a geometry has beside those of its documents
_PIECES = 4  # pairs of ranges that two ranks have, each of every document


def check_sweep(spec: Spec, values: Sequence[tuple[str, str, Sequence[Any]]]) -> None:
    """``values``: section, field and swept values of each axis.

    Raises:
        SpecError: together with the replicas they are too many points.
    """
    replicas = spec.measure.replicas
    count = replicas * math.prod(len(given) for _, _, given in values)
    if count > MOST_POINTS:
        section, field, longest = max(values, key=lambda axis: len(axis[2]))
        where = "measure.replicas" if replicas >= len(longest) else f"{section}.{field}"
        raise _error(spec, where, f"{count:,} points", f"{MOST_POINTS:,}; sweep fewer values")


def check_points(spec: Spec, configs: Iterable[TrialConfig]) -> list[TrialConfig]:
    """``configs``, no two of them equal.

    Raises:
        SpecError: a search adds too many, or their documents are too many.
    """
    found: dict[TrialConfig, None] = {}
    documents = 0
    for config in configs:
        found[config] = None
        documents += _documents(config)
        if len(found) > MOST_POINTS:
            most = f"{MOST_POINTS:,}; leave less open"
            raise _error(spec, "strategy.transport", f"more than {MOST_POINTS:,} points", most)
        if documents > MOST_DOCUMENTS:
            most = f"{MOST_DOCUMENTS:,} in all points together"
            raise _error(spec, "problem.documents", "too many documents", most)
    return list(found)


def check_work(spec: Spec, geometries: Iterable[TrialConfig]) -> None:
    """``geometries``: one point of each that is to be worked out.

    Raises:
        SpecError: that would take minutes, or hours.
    """
    work = 0
    for config in geometries:
        work += config.ring_size**2 * (_TABLES + _PIECES * _documents(config))
        if work > MOST_WORK:
            raise _error(
                spec,
                "problem.documents" if spec.problem.documents is not None else "ring.size",
                "too many lengths, ranks and documents to plan",
                "what a minute or two can work out; make several specs of it",
            )


def _documents(config: TrialConfig) -> int:
    given = config.documents
    return 0 if given is None else given if isinstance(given, int) else len(given)


def _error(spec: Spec, field: str, got: str, most: str) -> SpecError:
    return SpecError(
        f"{got}, a plan has at most {most}", path=spec.path, line=spec.line_of(field), field=field
    )
