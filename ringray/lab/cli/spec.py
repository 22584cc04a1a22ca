"""``validate``, ``plan`` and ``schema``: the content of a spec. Import neither torch nor ray."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ringray.base import deadline, units
from ringray.base.redaction import public_spec
from ringray.lab.cli.options import ALL, SPEC, Option, options, writing
from ringray.lab.plan.plan import Plan, build, trial_dict
from ringray.lab.report import words
from ringray.lab.spec import model as specs

_ROWS = 60  # rows of a table without --all


@options(SPEC)
def validate(arguments: argparse.Namespace) -> int:
    """Checks a spec and its plan; prints two lines if both are valid."""
    plan = _built(arguments)
    spec = plan.spec
    print(f"{arguments.spec}: {spec.name} ({spec.kind}) is valid, sweep {plan.digest[:12]}")
    print("\n".join([_counted(plan), *words.too_long(plan)]))
    return 0


@options(SPEC, Option("--json", metavar="F", help="write JSON to F; - is stdout"), ALL)
def plan(arguments: argparse.Namespace) -> int:
    """Prints the trials of a spec and their predicted cost."""
    made = _built(arguments)
    if arguments.json is not None:
        text = json.dumps(_as_json(made), indent=1)
        if arguments.json == "-":
            print(text)
            return 0
        with writing(arguments.json):
            file = deadline.opened(Path(arguments.json), os.O_TRUNC)
            with os.fdopen(file, "wb"):
                deadline.write(file, f"{text}\n".encode(), f"--json {arguments.json}")
    _print(made, everything=arguments.all)
    return 0


def schema(arguments: argparse.Namespace) -> int:
    """Prints the JSON Schema of specs."""
    print(json.dumps(specs.json_schema(), indent=2))
    return 0


def _built(arguments: argparse.Namespace) -> Plan:
    return build(specs.load(arguments.spec), processes=os.cpu_count() or 1)


def _print(plan: Plan, everything: bool) -> None:
    from ringray.lab.cli.results import say, title  # with rich, which `validate` does not need
    from ringray.lab.report import tables

    spec, runnable = plan.spec, plan.runnable
    configs = [trial.config.as_dict() for trial in runnable]
    console = tables.console()
    title(console, spec.name, plan.digest, (spec.kind, ""))
    say(console, words.constants(configs[0], words.varying(configs)), words.measured(configs[0]))
    console.print()
    shown = runnable if everything else runnable[:_ROWS]
    tables.show(tables.plan_table(shown), console)
    if len(shown) < len(runnable):
        console.print(f"... and {units.plural(len(runnable) - len(shown), 'trial')} more (--all)")
    console.print()
    for line in words.pruned(plan):
        console.print(line, style="bright_black", markup=False, soft_wrap=True)
    say(console, _counted(plan), *words.too_long(plan))


def _counted(plan: Plan) -> str:
    """Writes ``16 trials; predicted: 4.1 s of measuring, up to 12 MiB per rank, 30 GFLOP ...``."""
    pruned = len(plan.trials) - len(plan.runnable)
    said = units.plural(len(plan.runnable), "trial") + (f" and {pruned:,} pruned" if pruned else "")
    totals = _totals(plan)
    return (
        f"{said}; predicted: {units.duration(totals['measuring_s'])} of measuring, "
        f"up to {units.memory(totals['peak_memory_bytes'])} per rank, "
        f"{units.flops(totals['flops'])} and {units.memory(totals['sent_bytes'])} sent "
        "in one pass of each"
    )


def _totals(plan: Plan) -> dict[str, Any]:
    costs = [trial.predicted for trial in plan.runnable if trial.predicted]
    return {
        "trials": len(plan.runnable),
        "pruned": len(plan.trials) - len(plan.runnable),
        "measuring_s": sum(trial.measuring_s for trial in plan.runnable),
        "peak_memory_bytes": max(cost.peak_memory_bytes for cost in costs),
        "flops": sum(cost.flops for cost in costs),
        "sent_bytes": sum(cost.sent_bytes for cost in costs),
    }


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.spec.name,
        "kind": plan.spec.kind,
        "sweep": plan.digest,
        "spec": public_spec(plan.spec.canonical()),
        "totals": _totals(plan),
        "trials": [trial_dict(trial) for trial in plan.trials],
    }
