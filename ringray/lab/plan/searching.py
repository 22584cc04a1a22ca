"""Whether a spec's search and what it measures go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringray.base.errors import SpecError
from ringray.lab.kinds import KINDS
from ringray.lab.search import METHODS
from ringray.lab.trial.metrics import METRICS

if TYPE_CHECKING:
    from ringray.lab.spec.model import Spec


def check(spec: Spec) -> None:
    """Nothing, if a search can be made as the spec says.

    Raises:
        SpecError: an option that the method does not know, a kind that cannot be searched, or an
            objective that its trials do not measure.
    """
    search, kind, method = spec.search, KINDS[spec.kind], METHODS[spec.search.method]
    for name in ("budget", "seed"):
        value = getattr(search, name)
        if value is not None and name not in method.options:
            takes = ", ".join(sorted(method.options)) or "none"
            raise _wrong(spec, name, value, f"no {name}: {search.method} takes {takes}")
    if not kind.searchable:
        if method.exhaustive:
            return
        kinds = ", ".join(name for name, one in KINDS.items() if one.searchable)
        expected = f"grid, for kind {spec.kind} measures every point ({kinds} can be searched)"
        raise _wrong(spec, "method", search.method, expected)
    if not method.exhaustive and spec.measure.replicas > 1:
        expected = f"1 with search.method {search.method}, which repeats what is worth it"
        raise _wrong(spec, "replicas", spec.measure.replicas, expected, "measure")
    if kind.ranks_alone and len(spec.sweep("ring", "size")) > 1:
        expected = "one number: how many ranks measure side by side, each alone"
        raise _wrong(spec, "size", list(spec.sweep("ring", "size")), expected, "ring")
    groups = set(kind.measures)
    groups -= set() if spec.measure.warmup else {"memory"}
    groups -= set() if spec.measure.baseline else {"baseline"}
    measured = [one.name for one in METRICS.values() if one.objective and one.group in groups]
    for objective in search.objectives:
        if objective not in measured:
            raise _wrong(
                spec, "objectives", objective, f"what its trials measure: {', '.join(measured)}"
            )


def _wrong(spec: Spec, name: str, value: Any, expected: str, section: str = "search") -> SpecError:
    field = f"{section}.{name}"
    return SpecError(
        f"got {value!r}, expected {expected}",
        path=spec.path,
        line=spec.line_of(field),
        field=field,
    )
