"""The sections of a spec that do not change what is measured: ``limits`` and ``tracking``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ringray.base.redaction import UNPRINTABLE
from ringray.lab.specs.fields import TRUTH, Fields, duration, or_null, size, text, whole

_EXPERIMENT = text(rf"[^{UNPRINTABLE}\t\n]+", "1 to 250 printable characters", 250)
_SCHEME = r"(?i:https?|sqlite|(postgresql|mysql|mssql)(\+[a-z0-9]+)?)"
_URI = text(
    rf"{_SCHEME}://[^{UNPRINTABLE}\t\n ]+", "http://HOST:PORT, sqlite:///PATH or a database", 2000
)


class LimitsSection(Fields):
    """Limits at which a trial is given up. They do not change the identity of a sweep."""

    trial_timeout: Annotated[
        float | None, or_null(duration(1, 86400), "2 minutes, or longer if a trial needs it")
    ] = None
    """Longest time of one trial, in seconds. null: 10 times the predicted time of the longest
    trial, baseline included, and at least 120 s; if 50 times its own predicted time is less, a
    trial is stopped after that, but not before 60 s."""
    retries: Annotated[int, whole(0, 10)] = 2
    """Number of retries of a trial after a fault that is not its own: the loss of a rank, its node
    or its connections."""
    rank_memory: Annotated[int | None, or_null(size(1 << 20, 64 << 40), "what the machine has")] = (
        None
    )
    """Bytes that a rank may use beyond its usage at the start of its first trial: writable memory
    on a CPU, but of a training its tensors; PyTorch's allocator on a GPU. A trial that needs more
    is out of memory. null: the memory of the machine."""
    place_timeout: Annotated[float, duration(1, 86400)] = 600.0
    """Longest wait of a ring for its place, in seconds: until other work on the cluster ends or
    nodes start. It does not run while nodes boot."""


class TrackingSection(Fields):
    """The MLflow store of the results. Does not change the identity of a sweep."""

    experiment: Annotated[str, or_null(_EXPERIMENT, "the name")] = Field(
        default="", json_schema_extra={"default": None}
    )
    """MLflow experiment. null: the spec's name."""
    uri: Annotated[str | None, or_null(_URI, "the environment's, or local")] = None
    """MLflow tracking URI. null: $MLFLOW_TRACKING_URI, or sqlite under $RINGRAY_HOME."""
    enabled: Annotated[bool, TRUTH] = True
    """true: log to MLflow. false: results stay in the store only."""
