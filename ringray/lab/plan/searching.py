"""Whether a spec's search and what it measures go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringray.base.errors import SpecError
from ringray.lab.kinds import ALONE, SEARCHABLE
from ringray.lab.search import METHODS
from ringray.lab.search.base import load

if TYPE_CHECKING:
    from ringray.lab.spec.model import Spec

_TIMED = (
    "median_ms", "p20_ms", "p80_ms", "tflops", "tflops_per_rank", "tokens_per_s", "wait_ms",
    "sent_bytes",
)  # fmt: skip
_COMPARED = ("ratio", "baseline_ms")


def check(spec: Spec) -> None:
    """Nothing, if a search can be made as the spec says.

    Raises:
        SpecError: an option that the method does not know, a kind that cannot be searched, or an
            objective that its trials do not measure.
    """
    search = spec.search
    options = load(METHODS[search.method]).options
    for name in ("budget", "seed"):
        value = getattr(search, name)
        if value is not None and name not in options:
            takes = ", ".join(sorted(options)) or "none"
            raise _wrong(spec, name, value, f"no {name}: {search.method} takes {takes}")
    if search.method == "grid" and spec.kind not in SEARCHABLE:
        return
    if spec.kind not in SEARCHABLE:
        kinds = ", ".join(SEARCHABLE)
        expected = f"grid, for kind {spec.kind} measures every point ({kinds} can be searched)"
        raise _wrong(spec, "method", search.method, expected)
    if search.method != "grid" and spec.measure.replicas > 1:
        expected = f"1 with search.method {search.method}, which repeats what is worth it"
        raise _wrong(spec, "replicas", spec.measure.replicas, expected, "measure")
    if spec.kind in ALONE and len(spec.sweep("ring", "size")) > 1:
        expected = "one number: how many ranks measure side by side, each alone"
        raise _wrong(spec, "size", list(spec.sweep("ring", "size")), expected, "ring")
    measured = list(_TIMED)
    measured += ["peak_memory_bytes"] if spec.measure.warmup else []
    measured += _COMPARED if spec.measure.baseline else []
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
