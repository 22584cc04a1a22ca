"""Sweeps from Python: ``ringray.lab.run`` measures one, ``ringray.lab.results`` reads its results.

Mistakes are exceptions of ``ringray.base.errors``, with the texts of the command line.
"""

from __future__ import annotations

import io
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from ringray.base import provenance
from ringray.lab.cli.run import measure, planned
from ringray.lab.cli.store import as_it_stands, open_store
from ringray.lab.driver.observer import Summary
from ringray.lab.report.history import Measured, measurements
from ringray.lab.report.live import observer
from ringray.lab.specs import model as specs
from ringray.lab.specs.yaml_source import dumped
from ringray.lab.trial.config import FIELDS

if TYPE_CHECKING:
    import pandas as pd


def run(
    spec: str | os.PathLike[str] | Mapping[str, Any],
    *,
    changes: Sequence[str] = (),
    store: str | os.PathLike[str] | None = None,
    address: str | None = None,
    everything: bool = False,
    again: bool = False,
    tracking: bool = True,
    view: TextIO | None = None,
) -> Summary:
    """Measures the trials of a spec that have no result in the store, and returns how they ended.

    Args:
        spec: the path of a YAML file, the text of one (which has several lines), or its data.
        changes: fields with another value, as ``--set`` takes them: ``problem.seq_len=64k``.
        store: the store file; by default ``$RINGRAY_HOME/store.db``.
        address: a Ray cluster; by default RAY_ADDRESS, else a local Ray that ends with the call.
        everything: measures also points that their prediction rules out.
        again: measures every trial once more.
        tracking: writes to MLflow, if the spec does not say otherwise.
        view: where progress is shown, ``sys.stdout`` for example; by default nowhere.

    Raises:
        SpecError: the spec is wrong. Of others, PlaceError: a store, MLflow or Ray cannot be used.
        KeyboardInterrupt: it was interrupted and ended in order; the same call continues it.
    """
    if isinstance(spec, Mapping):
        read = specs.parse(dumped(dict(spec)), "<dict>", changes)
    elif isinstance(spec, str) and "\n" in spec:
        read = specs.parse(spec, changes=changes)
    else:
        read = specs.load(os.fspath(spec), changes)
    options = Namespace(
        store=None if store is None else os.fspath(store),
        address=address,
        all=everything,
        again=again,
        no_tracking=not tracking,
    )
    plan = planned(read, options)
    with open_store(options.store, create=True) as opened:
        summary = measure(plan, opened, options, observer(view or io.StringIO()))
    if summary.interrupted:
        raise KeyboardInterrupt(f"sweep {summary.name} is interrupted; the same call continues it")
    return summary


def results(
    sweep: str, store: str | os.PathLike[str] | None = None, *, history: bool = False
) -> pd.DataFrame:
    """Returns the results of a sweep, a row for each trial that has ended, in the order of the
    plan: the fields of its config, ``status``, ``reason``, ``attempts``, ``time`` (of its end),
    its metrics, its ``predicted_ms``, the repeats behind a metric as lists (``samples.ms``), and
    the hardware, versions and commit that it was measured with.

    ``attrs`` of the frame has the sweep's name, digest and status.

    Args:
        sweep: a name, or the start of a digest.
        store: the store file; by default ``$RINGRAY_HOME/store.db``.
        history: adds a row for each earlier measurement; ``current`` tells which ones count.

    Raises:
        UserError: there is no such sweep. PlaceError: the store cannot be used.
    """
    import pandas as pd

    with open_store(None if store is None else os.fspath(store), readonly=True) as opened:
        record = as_it_stands(opened, opened.find(sweep))
        rows = opened.trials(record.digest)
        earlier = [entry.trial for entry in opened.history(record.digest)] if history else []
    measured = [Measured(row, True) for row in rows if row.status is not None]
    if history:
        pruned = [point for point in measured if point.row.status == "pruned"]
        measured = sorted(measurements(rows, earlier) + pruned, key=lambda point: point.row.index)
    frame = pd.DataFrame([_record(point, record.environment, history) for point in measured])
    frame.attrs = {"sweep": record.name, "digest": record.digest, "status": record.status}
    return frame


def _record(measured: Measured, environment: dict[str, Any], history: bool) -> dict[str, Any]:
    row = measured.row
    where = row.environment or environment
    hardware: dict[str, Any] = where.get("hardware") or {}
    gpus = hardware.get("gpus") or []
    return {
        **row.config,
        "status": row.status,
        "reason": row.reason,
        "attempts": row.attempts,
        "time": row.ended and datetime.fromtimestamp(row.ended, UTC),
        **({"current": measured.current} if history else {}),
        **{f"metric.{name}" if name in FIELDS else name: n for name, n in row.numbers.items()},
        "predicted_ms": row.predicted.get("time_ms"),
        **{f"samples.{name}": values for name, values in row.samples.items()},
        "hardware": gpus[0] if gpus else hardware.get("cpu"),
        "cores": hardware.get("cores"),
        **(where.get("versions") or {}),
        "commit": provenance.commit(where),
    }
