"""Limits of a plan: its size, and whether its search fits what its trials measure.

A spec of a few lines can ask for more points than can be planned; the counts are checked before
anything of that size is made. Imports neither torch nor ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ringray.lab.kinds import KINDS
from ringray.lab.search import METHODS
from ringray.lab.specs.model import Spec
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.metrics import METRICS, REACH
from ringray.models import sizes
from ringray.training.corpus import Corpus, CorpusError
from ringray.training.tasks import TASKS

MOST_POINTS = 100_000
MOST_DOCUMENTS = 20_000_000  # boundaries of documents, of all points
MOST_WORK = 4_000_000_000  # elements of the planner's tables; 20 million take about a second
_TABLES = 16  # tables of ranks x ranks of a geometry, beside those of its documents
_PIECES = 4  # pairs of ranges that two ranks have, each of every document

# Fields that trainings do not read, and what a spec has in their place.
_UNREAD = {
    "problem.heads": "training.heads",
    "problem.kv_heads": "training.kv_heads",
    "problem.head_dim": "training.head_dim",
    "measure.repeats": "training.steps",
    "measure.warmup": "0",
    "measure.baseline": "null",
}


def check_sweep(spec: Spec, axes: Sequence[tuple[str, str, Sequence[Any]]]) -> None:
    """Checks the number of points; ``axes``: section, field and values of each swept field.

    Raises:
        SpecError: together with the replicas they are too many points.
    """
    replicas = spec.measure.replicas
    count = replicas * math.prod(len(values) for _, _, values in axes)
    if count > MOST_POINTS:
        section, field, longest = max(axes, key=lambda axis: len(axis[2]))
        where = "measure.replicas" if replicas >= len(longest) else f"{section}.{field}"
        message = f"{count:,} points, a plan has at most {MOST_POINTS:,}; sweep fewer values"
        raise spec.error(where, message)


def check_points(spec: Spec, configs: Iterable[TrialConfig]) -> list[TrialConfig]:
    """Returns ``configs`` without duplicates (kv_heads null and its value are one point).

    Raises:
        SpecError: a search adds too many points, or their documents are too many.
    """
    unique: dict[TrialConfig, None] = {}
    documents = 0
    for config in configs:
        unique[config] = None
        documents += _areas(config)
        if len(unique) > MOST_POINTS:
            most = f"{MOST_POINTS:,}; leave less open"
            message = f"more than {MOST_POINTS:,} points, a plan has at most {most}"
            raise spec.error("strategy.transport", message)
        if documents > MOST_DOCUMENTS:
            most = f"{MOST_DOCUMENTS:,} in all points together"
            field, parts = _dividing(spec)
            raise spec.error(field, f"too many {parts}, a plan has at most {most}")
    return list(unique)


def check_work(spec: Spec, geometries: Iterable[TrialConfig]) -> None:
    """Checks the work of predicting costs; ``geometries``: one point of each geometry.

    Raises:
        SpecError: it would take longer than a minute or two.
    """
    work = 0
    for config in geometries:
        work += config.ring.size**2 * (_TABLES + _PIECES * _areas(config))
        if work > MOST_WORK:
            field, parts = _dividing(spec)
            raise spec.error(
                field,
                f"too many lengths, ranks and {parts} to plan, a plan has at most what a minute "
                "or two can work out; make several specs of it",
            )


def _areas(config: TrialConfig) -> int:
    """Counts the parts of the mask and of shards that ``traffic.geometry`` counts one by one, at
    most."""
    documents = config.problem.documents
    count = len(documents) if isinstance(documents, tuple) else documents or 0
    return config.problem.most_areas(count)


def _dividing(spec: Spec) -> tuple[str, str]:
    """Returns the field that makes a plan large, and the parts of a sequence that it counts."""
    if spec.problem.documents is None and spec.problem.chunk is not None:
        return "problem.chunk", "chunks"
    return "ring.size" if spec.problem.documents is None else "problem.documents", "documents"


def check_sections(spec: Spec) -> None:
    """Raises SpecError if a kind that trains nothing has a training, or a training what it does
    not read."""
    fields_set = spec.training.model_fields_set
    if fields_set and not spec.trial_kind.trains:
        training = [name for name, kind in KINDS.items() if kind.trains]
        message = f"kind {spec.kind} trains nothing, expected kind {' or '.join(training)}"
        raise spec.error(f"training.{min(fields_set)}", message)
    for field, instead in _UNREAD.items() if spec.trial_kind.trains else ():
        section, _, name = field.partition(".")
        part = getattr(spec, section)
        if getattr(part, name) not in (None, 0, type(part).model_fields[name].default):
            message = f"kind {spec.kind} does not read it, expected {instead}"
            raise spec.error(field, message)


def check_corpus(spec: Spec) -> None:
    """Raises SpecError if the data of a training, which is on this machine, cannot be used."""
    train = spec.training
    paths = [path for path in spec.sweep("training", "corpus") if path is not None]
    if not paths:
        return
    try:
        corpus = Corpus(paths)
    except CorpusError as error:
        raise spec.error("training.corpus", str(error).removeprefix("corpus: ")) from None
    if train.tokenizer is not None:
        if not Path(train.tokenizer).is_dir():
            message = f"got {train.tokenizer!r}, expected the folder of a Hugging Face tokenizer"
            raise spec.error("training.tokenizer", message)
        return
    _check_vocabulary(spec, corpus.vocabulary, "as the corpus has")


def _check_vocabulary(spec: Spec, least: int, why: str) -> None:
    for name in spec.sweep("training", "model"):
        vocab = spec.training.vocab or sizes.named(name, {}).vocab
        if vocab < least:
            raise spec.error("training.vocab", f"got {vocab}, expected at least {least}, {why}")


def check_task(spec: Spec) -> tuple[int, ...] | None:
    """Returns the lengths in which a trained task is examined, None for that of the training;
    raises SpecError if model, mesh or lengths do not hold the task of this kind."""
    name, train = spec.trial_kind.task, spec.training
    examined = tuple(length for length in spec.sweep("training", "examined") if length is not None)
    if not name:
        if examined:
            raise spec.error("training.examined", f"kind {spec.kind} has no examination")
        return None
    task = TASKS[name]
    if train.corpus is not None:
        raise spec.error("training.corpus", f"kind {spec.kind} makes its own data, expected null")
    if max(spec.sweep("training", "pp")) > 1:
        raise spec.error("training.pp", f"expected 1: kind {spec.kind} examines without stages")
    for field, lengths in (
        ("problem.seq_len", spec.sweep("problem", "seq_len")),
        ("training.examined", examined),
    ):
        if lengths and min(lengths) < task.shortest:
            message = f"got {min(lengths)}, expected at least {task.shortest} for kind {spec.kind}"
            raise spec.error(field, message)
    _check_vocabulary(spec, task.vocabulary, f"as kind {spec.kind} has")
    return examined or None


def check_reach(spec: Spec) -> tuple[int, int]:
    """Returns the shortest and the longest context that are searched; raises SpecError for others
    than two lengths."""
    lengths = spec.sweep("problem", "seq_len")
    if len(lengths) != 2 or lengths[0] >= lengths[1]:
        message = f"got {list(lengths)}, expected two lengths, such as [1k, 1M]: from, to"
        raise spec.error("problem.seq_len", message)
    return lengths[0], lengths[1]


def check_search(spec: Spec) -> None:
    """Checks that the search fits its method, the kind and the metrics of the trials.

    Raises:
        SpecError: an option that the method does not take, a kind that cannot be searched, or an
            objective that its trials do not measure.
    """

    def refuse(field: str, value: object, expected: str) -> None:
        raise spec.error(field, f"got {value!r}, expected {expected}")

    search, kind, method = spec.search, spec.trial_kind, METHODS[spec.search.method]
    for name in ("budget", "seed"):
        value = getattr(search, name)
        if value is not None and name not in method.options:
            takes = ", ".join(sorted(method.options)) or "none"
            refuse(f"search.{name}", value, f"no {name}: {search.method} takes {takes}")
    if kind.bisects_length != method.extreme:
        fitting = [name for name, other in METHODS.items() if other.extreme == kind.bisects_length]
        refuse("search.method", search.method, f"{' or '.join(fitting)}, for kind {spec.kind}")
    if kind.bisects_length and search.objectives != (REACH,):
        refuse("search.objectives", list(search.objectives), f"{REACH}, for kind {spec.kind}")
    if not kind.searchable:
        if method.exhaustive or method.extreme:
            return
        kinds = ", ".join(name for name, other in KINDS.items() if other.searchable)
        expected = f"grid, for kind {spec.kind} measures every point ({kinds} can be searched)"
        refuse("search.method", search.method, expected)
    if not method.exhaustive and spec.measure.replicas > 1:
        expected = f"1 with search.method {search.method}, which repeats the better points"
        refuse("measure.replicas", spec.measure.replicas, expected)
    if kind.independent_ranks and len(sizes := spec.sweep("ring", "size")) > 1:
        expected = "one number: how many ranks measure side by side, each alone"
        refuse("ring.size", list(sizes), expected)
    groups = set(kind.measures)
    groups -= set() if spec.measure.warmup else {"memory"}
    groups -= set() if spec.measure.baseline else {"baseline"}
    measured = [m.name for m in METRICS.values() if m.objective and m.group in groups]
    for objective in search.objectives:
        if objective not in measured:
            expected = f"a metric that its trials measure: {', '.join(measured)}"
            refuse("search.objectives", objective, expected)
