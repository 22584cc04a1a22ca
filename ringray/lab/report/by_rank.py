"""Work and rows by rank in trials with documents, from the geometry of their configs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from ringray.base import units
from ringray.lab.predict import cost_model
from ringray.lab.report import page, words
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.outcome import TrialRow
from ringray.traffic.mask import LIMITS

_GEOMETRY = ("ring_size", "partition", "transport", "seq_len", "causal", *LIMITS)
_NUMBERS = ("least work", "mean", "most", "balance", "rows received", "by the busiest")
_MOST_RANKS = 512  # of a ring: the tables of larger ones take seconds
_CAPTION = (
    "Work: visible pairs of a rank's queries, per head. Rows: of K/V, that a rank receives in the "
    "forward pass, in the mean"
)


def table(trials: Sequence[TrialRow]) -> page.PageTable | None:
    """Returns the shares of ranks in what was measured, a line for each geometry; None without
    documents."""
    measured = [trial for trial in trials if trial.status == "ok"]
    fields = words.varying((trial.config for trial in measured), _GEOMETRY)
    lines: dict[tuple[str, ...], list[page.Number]] = {}
    for trial in measured:
        cells = tuple(words.value(name, trial.config.get(name)) for name in fields)
        if trial.config.get("documents") is None or cells in lines:
            continue
        with suppress(TypeError, KeyError, ValueError):  # of another version, or still open
            config = TrialConfig.from_dict(trial.config)
            if config.ring.size <= _MOST_RANKS:
                lines[cells] = _shares(config)
    rows: list[list[str | page.Number]] = [[*cells, *numbers] for cells, numbers in lines.items()]
    heads = [*(words.HEADS[name] for name in fields), *_NUMBERS]
    return page.PageTable(_CAPTION, heads, rows, sorts=True) if rows else None


def _shares(config: TrialConfig) -> list[page.Number]:
    moved = cost_model.choose_walks(config).forward
    work = moved.route.by_rank(moved.visible).sum(1)
    received = moved.route.by_rank(moved.chunk_rows.sum(0)).sum(1)
    most, mean = float(work.max()), float(work.mean())
    counts = [float(work.min()), mean, most, float(np.mean(received)), float(received.max())]
    numbers = [page.Number(units.digits(count), count) for count in counts]
    return [*numbers[:3], page.Number(f"{mean / most:.0%}", mean / most), *numbers[3:]]
