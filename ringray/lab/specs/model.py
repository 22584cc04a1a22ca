"""Specs: the description of a sweep, as a YAML file.

``load`` reads a file, ``parse`` a text; both return a frozen ``Spec`` or raise ``SpecError`` with
every mistake of the file, each with its line, its field, what was given and what is expected. The
fields of its sections are declared once (``sections``): the checks, the error texts and
``json_schema()`` follow from their bounds, defaults and docstrings.

``ringray.lab.plan.plan`` checks for each point of the sweep whether its fields go together (query
heads a multiple of K/V heads, a window only with causal, ...). Imports neither torch nor ray.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from ringray.base.errors import SpecError
from ringray.lab.kinds import KINDS, TrialKind
from ringray.lab.search import METHODS
from ringray.lab.specs.domain_fields import read_tables
from ringray.lab.specs.explain import explain
from ringray.lab.specs.fields import Fields, Kind, one_of, or_null, text, whole
from ringray.lab.specs.sections import (
    LimitsSection,
    MeasureSection,
    ProblemSection,
    RingSection,
    SearchSection,
    StrategySection,
    TrackingSection,
    TrainSection,
)
from ringray.lab.specs.yaml_source import Source, read_text
from ringray.lab.trial.config import LATER
from ringray.lab.trial.metrics import REACH

_FLEET = text(r"[^:]{1,500}(:[0-9x]{1,12})?", "hardware with its ranks, such as h100:8x8")
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


class Spec(Fields):
    """A sweep: each combination of the listed values is one point."""

    version: Annotated[int, Kind(whole(1, 1).type, "1")]
    """Version of this format."""
    name: Annotated[
        str, text(NAME, "a name: up to 64 letters, digits, '.', '_', '-', the first no sign")
    ]
    """Name of the sweep, as in `ringray status NAME`."""
    kind: Annotated[str, one_of(KINDS)]
    """Kind of the experiment that each trial does."""
    cluster: Annotated[str | None, or_null(_FLEET, "this machine's")] = None
    """Hardware for which costs are predicted, as HARDWARE:NODESxRANKS (`h100:512x8`); does not
    change the identity of a sweep. null: this machine's."""
    problem: ProblemSection
    ring: RingSection = Field(default_factory=RingSection)
    strategy: StrategySection = Field(default_factory=StrategySection)
    training: TrainSection = Field(default_factory=TrainSection)
    measure: MeasureSection = Field(default_factory=MeasureSection)
    search: SearchSection = Field(default_factory=SearchSection)
    limits: LimitsSection = Field(default_factory=LimitsSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    _source: Source | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kind, search = KINDS.get(str(data.get("kind"))), data.get("search", {})
        if kind is not None and kind.bisects_length and isinstance(search, dict):
            method = next(name for name, method in METHODS.items() if method.extreme)
            data = {**data, "search": {"method": method, "objectives": [REACH], **search}}
        name, tracking = data.get("name"), data.get("tracking", {})
        named = isinstance(name, str) and re.fullmatch(NAME, name)
        if named and isinstance(tracking, dict) and tracking.get("experiment") is None:
            data = {**data, "tracking": {**tracking, "experiment": name}}
        return data

    @property
    def trial_kind(self) -> TrialKind:
        """Returns what each trial does."""
        return KINDS[self.kind]

    @property
    def source(self) -> str:
        """Returns the text of the file."""
        return self._source.text if self._source else ""

    @property
    def path(self) -> str:
        """Returns the path of the file, as it was given."""
        return self._source.path if self._source else "<spec>"

    def line_of(self, field: str) -> int | None:
        """Returns the line that gives ``field`` (``problem.heads``); None if it has its default."""
        return self._source.line_of(tuple(field.split("."))) if self._source else None

    def error(self, field: str, message: str) -> SpecError:
        """Returns the error about ``field``, with its place in the file or the option."""
        where = tuple(field.split("."))
        if self._source and where in self._source.marks:
            return self._source.error(message, where, self._source.line_of(where))
        return SpecError(message, path=self.path, field=field)

    def sweep(self, section: str, field: str) -> tuple[Any, ...]:
        """Returns the values of ``field`` in ``section``, always as a tuple."""
        value = getattr(getattr(self, section), field)
        return value if isinstance(value, tuple) else (value,)

    def canonical(self) -> dict[str, Any]:
        """Returns the spec as JSON-able data in its normal form, with all defaults filled in and
        without the section of another kind."""
        trains = self.trial_kind.trains
        return self.model_dump(mode="json", exclude=None if trains else {"training"})

    @cached_property
    def digest(self) -> str:
        """sha256, in hex, of all but cluster, tracking, limits, the number of rings side by side
        and later fields that are not given. Of a training ``rank_memory`` counts: it decides what
        comes of it."""
        measured = self.canonical()
        if self.trial_kind.trains and self.limits.rank_memory is not None:
            measured["rank_memory"] = self.limits.rank_memory
        del measured["tracking"], measured["limits"], measured["cluster"]
        later = LATER.keys() & measured["problem"].keys()
        added = {"search": ("budget", "seed"), "problem": later, "training": ("pool", "offload")}
        for section in added.keys() & measured.keys():
            for option in added[section]:
                if measured[section][option] is None or measured[section][option] is False:
                    del measured[section][option]
        for part in measured.values():
            if isinstance(part, dict):
                part.pop("concurrent", None)  # no point depends on it
                if part.get("order") == LATER["order"]:
                    del part["order"]
        text = json.dumps(measured, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def load(path: str | Path, changes: Sequence[str] = ()) -> Spec:
    """Reads the spec in the file ``path``, with changes as ``parse`` takes them.

    Raises:
        SpecError: the file cannot be read, or anything in it is wrong.
    """
    return parse(read_text(path), str(path), changes)


def parse(text: str, path: str = "<spec>", changes: Sequence[str] = ()) -> Spec:
    """Reads the spec in ``text``; errors call it ``path``.

    ``changes``: fields that have another value, as ``problem.seq_len=64k``.

    Raises:
        SpecError: anything in it is wrong; one line for each mistake.
        UserError: a change has another form.
    """
    source = Source(text, path)
    for change in changes:
        source.replace(change)
    read_tables(source)
    try:
        spec = Spec.model_validate(source.data)
    except ValidationError as error:
        raise SpecError.together([*source.mistakes, *explain(error, source, Spec)]) from None
    if source.mistakes:
        raise SpecError.together(source.mistakes)
    spec._source = source
    return spec


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of specs."""
    plain = re.sub(r'(\w)Section"', r'\1"', json.dumps(Spec.model_json_schema()))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **json.loads(plain)}
