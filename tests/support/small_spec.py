"""A small sweep for tests of the command line: its spec, and a store that holds it."""

from __future__ import annotations

from pathlib import Path

from ringray.base import provenance
from ringray.lab.plan import plan
from ringray.lab.plan.trial import cost_dict
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome, SweepInfo, TrialInfo

SMALL = """\
version: 1
name: small
kind: latency
problem:
  seq_len: 64
  heads: 2
  window: [null, 3]
  causal: [true, false]
strategy:
  partition: [contiguous, zigzag]
measure: {repeats: 2}
tracking: {enabled: false}
"""


def fill(path: Path | str, text: str = SMALL, ended: int = 2) -> plan.Plan:
    """A store that holds the sweep of ``text`` with its first ``ended`` trials measured."""
    made = plan.build(spec.parse(text))
    with Store(path) as store:
        described = provenance.describe()
        store.begin(
            SweepInfo(
                made.digest, made.spec.name, made.spec.kind, made.spec.canonical(), text, described
            ),
            [
                TrialInfo(
                    one.key,
                    one.index,
                    one.config.as_dict(),
                    cost_dict(one),
                    str(one.pruned) if one.pruned else None,
                )
                for one in made.trials
            ],
        )
        for one in made.runnable[:ended]:
            metrics = {"median_ms": 12.34, "p20_ms": 12.1, "p80_ms": 12.9, "baseline_ms": 13.0}
            metrics |= {"ratio": 0.95, "tflops": 0.161, "peak_memory_bytes": 4.0 * 2**20}
            point = one.point(described)
            store.record(
                made.digest,
                one.key,
                Outcome("ok", None, metrics, {}, point, 1, 1.0, 2.0),
            )
    return made
