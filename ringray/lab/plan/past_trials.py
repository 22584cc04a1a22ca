"""Measured trials of a store, to which predictions are fitted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ringray.base.errors import UserError
from ringray.lab.kinds import KINDS
from ringray.lab.predict.fitting import NEWEST, MeasuredTrial
from ringray.lab.store.store import Store, default_path
from ringray.lab.trial.config import TrialConfig

_SWEEPS = 32  # the newest, whose trials are taken


def past_trials(named: str | None, but: str = "") -> Iterator[MeasuredTrial]:
    """Yields trials of the named store or the default one, newest sweeps first, except those of one
    sweep; none, with a warning, if it cannot be read."""
    path = Path(named) if named else default_path()
    if not path.exists():
        return
    try:
        with Store(path, readonly=True) as store:
            for sweep in islice(store.sweeps(), _SWEEPS):
                kind = KINDS.get(sweep.kind)
                if sweep.digest == but or kind is None or kind.independent_ranks:
                    continue
                for row in store.newest(sweep.digest, NEWEST):
                    if "prediction_ratio" not in row.numbers:
                        continue
                    seconds, environment = row.metrics["median_ms"] / 1e3, row.environment
                    with suppress(TypeError):  # of another version, with other fields
                        config = TrialConfig.from_dict(row.config)
                        yield MeasuredTrial(config, seconds, environment or sweep.environment)
    except UserError as error:
        print(f"ringray: warning: predictions without its trials: {error}", file=sys.stderr)
