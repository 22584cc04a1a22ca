"""The report of sweeps: one page with what was asked, the answer, figures, all trials, faults,
environment, and how to repeat it.

A pure function of the store's rows and of the traces beside the store.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ringray.base import units
from ringray.base.redaction import hidden
from ringray.lab.predict import cost_model
from ringray.lab.report import page, verdict, words
from ringray.lab.report.figures import charts
from ringray.lab.report.figures.data import points
from ringray.lab.report.tables import results_columns, when
from ringray.lab.store.traces import path_of
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.outcome import SweepRow, TrialRow
from ringray.traffic.mask import LIMITS

_VALUES = 12  # of a field that varies, listed one by one
_GEOMETRY = ("ring_size", "partition", "transport", "seq_len", "causal", *LIMITS)
_OF_RANKS = ("least work", "mean", "most", "balance", "rows received", "by the busiest")
_MOST_RANKS = 512  # of a ring: the tables of larger ones take seconds
_SHARES = (
    "Work: visible pairs of a rank's queries, per head. Rows: of K/V, that a rank receives in the "
    "forward pass, in the mean"
)
_BARS = 1500  # of a timeline


def document(sweeps: Sequence[tuple[SweepRow, Sequence[TrialRow]]]) -> str:
    """Returns the page of sweeps with their trials; each is a part of its own if there are
    several."""
    names = [sweep.name for sweep, _ in sweeps]
    if len(sweeps) == 1:
        sweep, trials = sweeps[0]
        about = f"ringray report · {sweep.kind} · sweep {sweep.digest[:12]} · {when(sweep.updated)}"
        return page.render(sweep.name, parts(sweep, trials), about)
    sections = []
    for sweep, trials in sweeps:
        digest = f" ({sweep.digest[:12]})" if names.count(sweep.name) > 1 else ""
        sections.append(page.Section(sweep.name + digest, parts(sweep, trials)))
    return page.render(f"{len(sweeps)} sweeps", sections, "ringray report")


def parts(sweep: SweepRow, trials: Sequence[TrialRow]) -> list[page.Section]:
    """Returns the sections of one sweep."""
    blocks = {
        "What was asked": list(_asked(sweep, trials)),
        "Answer": list(_answer(sweep, trials)),
        "Figures": list(_pictures(sweep, trials)),
        "Shares of ranks": [table] if (table := shares_of_ranks(trials)) else [],
        "All trials": [_trials(trials)],
        "Faults": list(_faults(trials)),
        "Environment": [page.Facts(_facts(sweep.environment))],
        "Repeat it": list(_again(sweep)),
    }
    return [page.Section(title, blocks[title]) for title in blocks if blocks[title]]


def _asked(sweep: SweepRow, trials: Sequence[TrialRow]) -> Iterator[Any]:
    configs = [trial.config for trial in trials]
    fields = words.varying(configs)
    pending = sum(trial.status is None for trial in trials)
    counts = Counter(str(trial.status) for trial in trials if trial.status)
    ended = f"{sweep.status}: {words.counts(counts, pending)} of {len(trials):,} trials"
    varied = [(words.HEADS[name], _values(name, configs)) for name in fields]
    yield page.Text(ended, "bad" if sweep.status == "failed" else "")
    yield page.Facts([("kind", sweep.kind), *varied])
    with suppress(KeyError, IndexError):  # a config of another version, or none
        fixed = words.constants(configs[0], fields)
        yield page.Text(f"In all trials: {fixed}; {words.measured(configs[0])}.", "pale")


def _values(name: str, configs: Sequence[Mapping[str, Any]]) -> str:
    texts = list(dict.fromkeys(words.value(name, config.get(name)) for config in configs))
    rest = f" and {len(texts) - _VALUES} more" if len(texts) > _VALUES else ""
    return ", ".join(texts[:_VALUES]) + rest


def _answer(sweep: SweepRow, trials: Sequence[TrialRow]) -> Iterator[Any]:
    if lines := verdict.answer(sweep.kind, trials):
        yield page.Listing(lines)
    if errors := verdict.predictions(trials):
        yield page.Text(f"Predictions: {errors}.", "pale")
    cores = (sweep.environment.get("hardware") or {}).get("cores", 0)
    if busy := verdict.busy(trials, cores):
        yield page.Text(f"Other load: {busy}.", "bad")


def _pictures(sweep: SweepRow, trials: Sequence[TrialRow]) -> Iterator[page.Picture]:
    from ringray.lab.report.figures import style

    for name, chart in charts(trials):
        yield style.picture(chart, f"f{sweep.digest[:12]}-{name}")
    traced = [point for point in points(trials) if "median_ms" in point.metrics]
    for trial in sorted(traced, key=lambda point: point.metrics["median_ms"]):
        if timeline := _timeline(sweep, trial):
            yield timeline
            return


def _timeline(sweep: SweepRow, trial: TrialRow) -> page.Picture | None:
    """Returns the ring's timeline in a trial; None without a trace that can be read."""
    from ringray.lab.report import trace_figure
    from ringray.lab.report.figures import style

    try:
        bars = trace_figure.read(path_of(sweep.digest, trial.key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    shown = sorted(bars, key=lambda bar: bar.began)[:_BARS]
    title = f"Timeline of trial #{trial.index + 1}, of the least time with a trace"
    caption = f"the first {_BARS} of {len(bars)} steps" if len(bars) > _BARS else ""
    if not shown:
        return None
    name = f"f{sweep.digest[:12]}-timeline"
    return style.picture(trace_figure.chart(shown, caption), name, title)


def shares_of_ranks(trials: Sequence[TrialRow]) -> page.PageTable | None:
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
    heads = [*(words.HEADS[name] for name in fields), *_OF_RANKS]
    return page.PageTable(_SHARES, heads, rows, sorts=True) if rows else None


def _shares(config: TrialConfig) -> list[page.Number]:
    moved = cost_model.choose_walks(config).forward
    work = moved.route.by_rank(moved.visible).sum(1)
    received = moved.route.by_rank(moved.chunk_rows.sum(0)).sum(1)
    most, mean = float(work.max()), float(work.mean())
    counts = [float(work.min()), mean, most, float(np.mean(received)), float(received.max())]
    numbers = [page.Number(units.digits(count), count) for count in counts]
    return [*numbers[:3], page.Number(f"{mean / most:.0%}", mean / most), *numbers[3:]]


def _trials(trials: Sequence[TrialRow]) -> page.PageTable:
    fields = words.varying(trial.config for trial in trials)
    heads, metrics, reasons = results_columns(trials, fields)
    best = {row.key for row in verdict.winners(trials)}
    rows = []
    for trial in trials:
        numbers, tone = trial.numbers, "good" if trial.key in best else ""
        cells = [_field(name, trial.config.get(name)) for name in fields]
        cells.append(trial.status or "pending")
        for metric in metrics:
            value, text = numbers.get(metric.name), words.metric(metric, numbers)
            cells.append(page.Number(text, value, tone if metric.name == "median_ms" else ""))
        cells += [hidden(trial.reason or "")] if reasons else []
        rows.append([_count(trial.index + 1), *cells])
    legend = "; green: the fastest of its problem, as far as decided" if best else ""
    return page.PageTable(f"{units.plural(len(rows), 'trial')}{legend}", heads, rows, sorts=True)


def _count(number: float) -> page.Number:
    return page.Number(str(number), float(number))


def _field(name: str, value: Any) -> str | page.Number:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return _count(value) if number else words.value(name, value)


def _faults(trials: Sequence[TrialRow]) -> Iterator[Any]:
    pruned = Counter(trial.reason or "" for trial in trials if trial.status == "pruned")
    bad = [trial for trial in trials if trial.status in ("failed", "oom", "timeout")]
    bad += [trial for trial in trials if trial.status == "ok" and trial.attempts > 1]
    if bad:
        fields = words.varying(trial.config for trial in trials)
        rows: list[list[str | page.Number]] = []
        for trial in bad:
            name, attempts = words.label(trial.config, fields), _count(trial.attempts)
            rows.append([_count(trial.index + 1), name, str(trial.status), attempts, _met(trial)])
            rows[-1].append(hidden(trial.reason or ""))
        caption = f"{units.plural(len(bad), 'trial')} failed or took several attempts"
        heads = ["#", "trial", "status", "attempts", "faults on the way", "why"]
        yield page.PageTable(caption, heads, rows, sorts=len(rows) > 10)
    if pruned:
        counts = [(units.plural(count, "point"), why) for why, count in pruned.most_common()]
        yield page.Listing([f"{points} pruned: {hidden(why)}" for points, why in counts])


def _met(trial: TrialRow) -> str:
    faults = (trial.environment or {}).get("faults") or ()
    parts = [(fault.get("kind"), fault.get("node")) for fault in faults]
    texts = (" on ".join(str(part) for part in both if part) for both in parts)
    return hidden(", ".join(dict.fromkeys(texts)))


def _facts(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the known facts of an environment with their full names."""
    facts = []
    for name, value in words.flat(environment, " "):
        if value not in (None, "", []):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            facts.append((name, hidden(text)))
    return facts


def _again(sweep: SweepRow) -> Iterator[Any]:
    commit = (sweep.environment.get("git") or {}).get("commit")
    file = shlex.quote(f"{sweep.name}.yaml")
    lines = [*([f"git checkout {shlex.quote(str(commit))}"] if commit else [])]
    lines += [f"ringray run {file}  # the spec below", f"ringray report {shlex.quote(sweep.name)}"]
    yield page.Code("\n".join(lines))
    yield page.Text(f"The spec, {sweep.name}.yaml:")
    yield page.Code(hidden(sweep.source))
