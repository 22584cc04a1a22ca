"""Metrics: the numbers in a trial's record, one table for all that measure, compare or show them.

To add one to a trial, let the kind put its values into ``RankReport.values`` under its name and
give it a line here. Readings of the machine are declared in ``machine_load`` instead. The order of
the table is the order of columns.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ringray.lab.trial.machine_load import LOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Group = Literal["time", "memory", "traffic", "baseline", "overlap", "error", "load"]
Table = Literal["results", "live", "mlflow", "tuned"]


@dataclass(frozen=True)
class Metric:
    """A number of a trial: how it comes about, how it is compared and where it is shown."""

    name: str
    unit: str
    """"" for counts, ``ratio`` and ``share`` for quotients."""
    group: Group
    """The part of a trial that yields it; a kind names the groups that it measures."""
    less_is_better: bool = True
    ranks: Callable[[Sequence[float]], float] | None = None
    """How the medians of the ranks' values become one; None where ``measurement`` computes it."""
    visits: Literal["last", "max", "mean"] = "last"
    """How several visits to one trial become one number."""
    replicas: Callable[[Sequence[float]], float] = statistics.median
    """How the replicas of a point become one number."""
    median_of: str = ""
    """The samples that it is the median of."""
    exact: bool = False
    """Whether it is equal in every repeat."""
    predicted: str = ""
    """The field of the cost model that stands for it in a search."""
    objective: bool = True
    """Whether ``search.objectives`` may name it."""
    heading: str = ""
    """The heading of its column."""
    upto: str = ""
    """The metric that ends the range that the column shows."""
    beside: str = ""
    """The metric without which the column is left out."""
    tables: tuple[Table, ...] = ()
    """The tables with such a column; ``mlflow``: the description of a sweep; ``tuned``: the tuned
    choices, which keep the metric."""
    essential: bool = False
    """Whether a narrow terminal keeps the column."""
    extreme: Literal["best", "worst", ""] = ""
    """The value of all trials that the sweep's run in MLflow reports."""


def _metrics() -> Iterator[Metric]:
    for tensor in ("out", "dq", "dk", "dv"):
        yield Metric(
            f"error_{tensor}", "", "error", heading=f"error {tensor}",
            tables=("results", "mlflow"), essential=True, extreme="worst",
        )  # fmt: skip
    yield Metric(
        "median_ms", "ms", "time", median_of="ms", predicted="time_ms",
        heading="median ms", essential=True, tables=("results", "live", "mlflow", "tuned"),
    )  # fmt: skip
    yield Metric(
        "p20_ms", "ms", "time", predicted="time_ms", replicas=min,
        heading="p20–p80 ms", upto="p80_ms", tables=("results", "live", "tuned"),
    )  # fmt: skip
    yield Metric("p80_ms", "ms", "time", predicted="time_ms", replicas=max, tables=("tuned",))
    yield Metric(
        "baseline_ms", "ms", "baseline", median_of="baseline_ms",
        heading="baseline ms", essential=True, tables=("results",),
    )  # fmt: skip
    yield Metric(
        "ratio", "ratio", "baseline", median_of="ratio", predicted="time_ms", extreme="best",
        heading="ratio", essential=True, tables=("results", "live", "mlflow", "tuned"),
    )  # fmt: skip
    yield Metric(
        "tflops", "TFLOP/s", "time", less_is_better=False, predicted="time_ms",
        heading="TFLOP/s", tables=("results", "live", "mlflow", "tuned"),
    )  # fmt: skip
    yield Metric("tflops_per_rank", "TFLOP/s", "time", less_is_better=False, predicted="time_ms")
    yield Metric(
        "tokens_per_s", "tokens/s", "time", less_is_better=False, predicted="time_ms",
        tables=("mlflow",),
    )  # fmt: skip
    yield Metric(
        "compute_ms",
        "ms",
        "overlap",
        ranks=max,
        heading="compute ms",
        essential=True,
        tables=("results",),
    )
    yield Metric(
        "transfer_ms",
        "ms",
        "overlap",
        ranks=max,
        heading="transfer ms",
        essential=True,
        tables=("results",),
    )
    yield Metric(
        "wait_ms", "ms", "time", ranks=max, visits="mean",
        heading="wait ms", essential=True, beside="transfer_ms", tables=("results",),
    )  # fmt: skip
    yield Metric(
        "hidden", "share", "overlap", less_is_better=False,
        heading="hidden", essential=True, beside="transfer_ms", tables=("results",),
    )  # fmt: skip
    yield Metric(
        "peak_memory_bytes", "bytes", "memory", ranks=max, visits="max", exact=True,
        predicted="peak_memory_bytes", heading="peak MiB",
        tables=("results", "live", "mlflow", "tuned"),
    )  # fmt: skip
    yield Metric(
        "sent_bytes", "bytes", "traffic", ranks=sum, exact=True, predicted="sent_bytes",
        heading="sent MiB", tables=("results", "live"),
    )  # fmt: skip
    yield Metric("repeats", "", "time", less_is_better=False, objective=False, tables=("tuned",))
    for name, load in LOADS.items():
        yield Metric(name, load.unit, "load", ranks=load.ranks, objective=False)


METRICS: dict[str, Metric] = {metric.name: metric for metric in _metrics()}


def columns(table: Table) -> list[Metric]:
    """Returns the metrics that have a column in ``table``."""
    return [metric for metric in METRICS.values() if table in metric.tables]


def of_group(group: Group) -> list[str]:
    """Returns the names of a group's metrics."""
    return [metric.name for metric in METRICS.values() if metric.group == group]
