"""Metrics: the numbers in a trial's record, one table for all that measure, compare or show them.

To add one to a trial, let the kind put its values into ``RankReport.values`` under its name and
give it a line here. Readings of the machine are declared in ``machine_load`` instead. The order of
the table is the order of columns; ``mlflow`` is the table in a sweep's description, ``tuned`` the
metrics that a tuned choice keeps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ringray.lab.trial.machine_load import LOADS

SCORE = "score"
REACH = "context"  # the metric that a search for the longest one makes larger
Group = Literal["time", "memory", "traffic", "baseline", "overlap", "error", "training", "load"]
Table = Literal["results", "live", "mlflow", "tuned"]


@dataclass(frozen=True)
class Metric:
    """A number of a trial: how it comes about, how it is compared and where it is shown."""

    name: str
    unit: str  # "" for counts, "ratio" and "share" for quotients
    group: Group  # the part of a trial that yields it; a kind names the groups that it measures
    # How the medians of the ranks' values become one number; None where ``measurement`` computes it
    ranks: Callable[[Sequence[float]], float] | None = None
    visits: Literal["last", "max", "mean"] = "last"  # how several visits to a trial become one
    replicas: Callable[[Sequence[float]], float] = statistics.median  # how a point's replicas do
    median_of: str = ""  # the samples that it is the median of
    exact: bool = False  # equal in every repeat
    less_is_better: bool = True
    objective: bool = True  # ``search.objectives`` may name it
    predicted: str = ""  # the field of the cost model that stands for it in a search
    over_predicted: str = ""  # the metric whose value over its prediction this one is
    heading: str = ""  # of its column
    upto: str = ""  # the metric that ends the range that the column shows
    beside: str = ""  # the metric without which the column is left out
    tables: tuple[Table, ...] = ()  # the tables with such a column
    expendable: bool = False  # a narrow terminal leaves the column out
    legend: str = ""  # below the results of a run; ``{baseline}`` stands for the baseline's name
    extreme: Literal["best", "worst", ""] = ""  # of all trials, as the sweep's run in MLflow has it
    exported: str = ""  # its name in Prometheus, see ``exported``
    meaning: str = ""  # of the exported number, in ASCII


_ALL: tuple[Table, ...] = ("results", "live", "mlflow", "tuned")
_ERROR = "error: share of the budget, 2 × the error of flash SDPA; up to 1 passes"
_PREDICTION = "÷ predicted: the median time ÷ the predicted one"
_RATIO = "ratio: the ring's time ÷ that of {baseline}, in turns; below 1 the ring is faster"
# fmt: off
_METRICS = (
    *(Metric(f"error_{tensor}", "", "error", heading=f"error {tensor}",
             tables=("results", "mlflow"), extreme="worst", legend=_ERROR * (tensor == "out"))
      for tensor in ("out", "dq", "dk", "dv")),
    Metric("median_ms", "ms", "time", median_of="ms", predicted="time_ms",
           heading="median ms", tables=_ALL,
           exported="pass_seconds", meaning="Median time of one pass, or of one training step."),
    Metric("p20_ms", "ms", "time", replicas=min, predicted="time_ms",
           heading="p20–p80 ms", upto="p80_ms",
           tables=("results", "live", "tuned"), expendable=True),
    Metric("p80_ms", "ms", "time", replicas=max, predicted="time_ms", tables=("tuned",)),
    Metric("baseline_ms", "ms", "baseline", median_of="baseline_ms",
           heading="baseline ms", tables=("results",)),
    Metric("ratio", "ratio", "baseline", median_of="ratio", predicted="time_ms",
           heading="ratio", tables=_ALL, extreme="best", legend=_RATIO),
    Metric("tflops", "TFLOP/s", "time", less_is_better=False, predicted="time_ms",
           heading="TFLOP/s", tables=_ALL, expendable=True,
           exported="flops_per_second", meaning="FLOP/s of all ranks together."),
    Metric("tflops_per_rank", "TFLOP/s", "time", less_is_better=False, predicted="time_ms"),
    Metric("tokens_per_s", "tokens/s", "time", less_is_better=False, predicted="time_ms",
           tables=("mlflow",),
           exported="tokens_per_second", meaning="Tokens of all sequences per second."),
    Metric("compute_ms", "ms", "overlap", max, heading="compute ms", tables=("results",)),
    Metric("transfer_ms", "ms", "overlap", max, heading="transfer ms", tables=("results",)),
    Metric("wait_ms", "ms", "time", max, "mean",
           heading="wait ms", beside="transfer_ms", tables=("results",),
           exported="hop_wait_seconds",
           meaning="Wait for messages in one pass, of the rank that waits most."),
    Metric("hidden", "share", "overlap", less_is_better=False,
           heading="hidden", beside="transfer_ms", tables=("results",),
           legend="hidden: share of the transfer time during which no rank waited"),
    Metric("peak_memory_bytes", "bytes", "memory", max, "max", exact=True,
           predicted="peak_memory_bytes", heading="peak MiB", tables=_ALL, expendable=True,
           exported="peak_memory_bytes",
           meaning="Peak memory of the rank that needs most, as PyTorch's allocator counts it."),
    Metric("sent_bytes", "bytes", "traffic", sum, exact=True, predicted="sent_bytes",
           heading="sent MiB", tables=("results", "live"), expendable=True,
           exported="sent_bytes", meaning="Bytes that all ranks send in one pass."),
    # Of the last step.
    Metric("loss", "", "training", max, heading="loss", tables=("results", "live", "mlflow"),
           extreme="best"),
    Metric(REACH, "tokens", "training", max, exact=True, less_is_better=False, extreme="best"),
    Metric(SCORE, "share", "training", max, less_is_better=False, heading=SCORE,
           tables=("results", "live", "mlflow"), extreme="best",
           legend="score: in the task trained, at the longest sequence examined; 1 is all"),
    Metric("gradient_norm", "", "training", max, objective=False),
    Metric("mfu", "share", "training", less_is_better=False, heading="MFU",
           tables=("results", "live", "mlflow"), extreme="best",
           legend="MFU: FLOPs of the model's visible pairs ÷ time ÷ the peak of all ranks",
           exported="mfu_ratio",
           meaning="Share of the peak FLOP/s of all ranks that a training uses."),
    # Never recorded: a record has both numbers.
    Metric("prediction_ratio", "ratio", "time", over_predicted="median_ms", objective=False,
           heading="÷ predicted", tables=("results", "mlflow"), expendable=True,
           legend=_PREDICTION),
    Metric("prediction_memory_ratio", "ratio", "memory", over_predicted="peak_memory_bytes",
           objective=False),
    Metric("repeats", "", "time", less_is_better=False, objective=False, tables=("tuned",)),
    *(Metric(name, load.unit, "load", load.ranks, objective=False)
      for name, load in LOADS.items()),
)
# fmt: on
METRICS: dict[str, Metric] = {metric.name: metric for metric in _METRICS}


def columns(table: Table) -> list[Metric]:
    """Returns the metrics that have a column in ``table``."""
    return [metric for metric in METRICS.values() if table in metric.tables]


def of_group(group: Group) -> list[str]:
    """Returns the names of a group's metrics."""
    return [metric.name for metric in METRICS.values() if metric.group == group]


def over_predicted(metrics: Mapping[str, float], predicted: Mapping[str, Any]) -> dict[str, float]:
    """Returns measured over predicted values; ``predicted``: a trial's cost as its record has it,
    {} in some records of earlier versions."""
    ratios = {}
    for metric in METRICS.values():
        if metric.over_predicted:
            value = metrics.get(metric.over_predicted, 0.0)
            expected = predicted.get(METRICS[metric.over_predicted].predicted)
            if isinstance(expected, int | float) and expected > 0 and 0 < value < math.inf:
                ratios[metric.name] = value / expected
    return ratios


def prediction_errors(trials: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns how far predictions were off in ``trials``, each with its ratios: 0.07 is a factor of
    1.07 either way. Empty if no time was predicted."""
    import numpy as np

    measured = list(trials)

    def errors(name: str) -> list[float]:
        ratios = (trial.get(name, 0) for trial in measured)
        return [max(ratio, 1 / ratio) - 1 for ratio in ratios if ratio > 0]

    times, memory = errors("prediction_ratio"), errors("prediction_memory_ratio")
    if not times:
        return {}
    summary: dict[str, float] = {"prediction_trials": len(times)}
    summary["prediction_median_error"] = statistics.median(times)
    summary["prediction_p90_error"] = float(np.quantile(times, 0.9))
    if memory:
        summary["prediction_memory_error"] = statistics.median(memory)
    return summary
