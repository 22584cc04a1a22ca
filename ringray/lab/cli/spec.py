"""``validate``, ``plan`` and ``schema``: the content of a spec. Import neither torch nor ray."""

from __future__ import annotations

import argparse
import json
import math
import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ringray.base import provenance, units
from ringray.base.errors import UserError
from ringray.base.redaction import public_spec
from ringray.lab.cli.options import SET, SPEC, STORE, Option, Output, options, write
from ringray.lab.plan import forecast
from ringray.lab.plan.plan import Plan, build
from ringray.lab.plan.trial import trial_dict
from ringray.lab.predict import calibration, cost_model
from ringray.lab.predict.fitting import past_trials
from ringray.lab.predict.hardware import Fleet, Noise
from ringray.lab.report import words
from ringray.lab.specs import model as specs
from ringray.lab.specs.fields import PRICE
from ringray.lab.store import traces
from ringray.lab.trial.config import TrialConfig, default_config
from ringray.lab.trial.measurement import RankReport

_SLOW = "rank R takes X times as long"
_ROWS = 60  # rows of a table without --all
_TIMELINES = 64  # ranks in a predicted timeline


@options(SPEC, SET)
def validate(arguments: argparse.Namespace) -> int:
    """Checks a spec and its plan; prints two lines if both are valid."""
    plan = build(specs.load(arguments.spec, arguments.set), processes=provenance.cores())
    spec = plan.spec
    print(f"{arguments.spec}: {spec.name} ({spec.kind}) is valid, sweep {plan.digest[:12]}")
    print("\n".join([_counted(plan), *words.warnings(plan)]))
    return 0


def _slow(text: str) -> tuple[int, float]:
    """Reads an option."""
    rank, _, factor = text.partition(":")
    with suppress(ValueError):
        if rank.isdecimal() and 1 <= float(factor) < math.inf:
            return int(rank), float(factor)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected RANK:FACTOR such as 3:1.5")


@options(
    SPEC,
    SET,
    STORE,
    Output("--json", metavar="F", help="write JSON to F; - is stdout"),
    Option("--all", action="store_true", help="plan and show every point, as `run --all` does"),
    Option("--price", metavar="P", type=PRICE.argument, help="of a rank and hour: adds the cost"),
    Option("--on", metavar="FLEET", help="predict for h100:8x8, 8 nodes of 8 ranks; local: here"),
    Option("--jitter", metavar="X", type=float, default=0.0, help="spread of each step (0.05)"),
    Option("--slow", metavar="R:X", action="append", default=[], type=_slow, help=_SLOW),
    Output("--timeline", metavar="F", help="write the predicted timeline of the first trial to F"),
)
def plan(arguments: argparse.Namespace) -> int:
    """Prints the trials of a spec and their predicted cost."""
    if arguments.json == arguments.timeline == "-":
        raise UserError("--json, --timeline: only one of them can be stdout")
    elsewhere = os.environ.get("RAY_ADDRESS")
    spec = specs.load(arguments.spec, arguments.set)
    made = build(
        spec,
        _fleet(arguments, spec.cluster),
        processes=provenance.cores(),
        everything=arguments.all,
        machine=None if elsewhere else provenance.memory_bytes(),
        seen=past_trials(arguments.store, spec.digest),
    )
    price = arguments.price
    if price is None and made.named:
        price = made.on.hardware.price
    _check_noise(made)
    if arguments.timeline is not None:
        write("--timeline", arguments.timeline, _timeline(made))
    if arguments.json is not None:
        write("--json", arguments.json, json.dumps(_as_json(made, price), indent=1) + "\n")
        if arguments.json == "-":
            return 0
    _print(made, price, everything=arguments.all)
    return 0


def _fleet(arguments: argparse.Namespace, cluster: str | None) -> Fleet | None:
    """Returns the fleet of ``--on``, or that of the spec, with its noise; None for this machine
    without any."""
    if not 0 <= arguments.jitter <= 1:
        raise UserError(f"--jitter: got {arguments.jitter:g}, expected a share from 0 to 1")
    slow = dict(arguments.slow)
    if (named := cluster if arguments.on is None else arguments.on) is None:
        if not slow and not arguments.jitter:
            return None
        raise UserError("--jitter, --slow: expected beside --on, such as --on h100:8x8")
    try:
        on = calibration.fleet(named)
    except UserError as error:
        asked = "cluster" if arguments.on is None else "--on"
        raise UserError(f"{asked}: {error}") from None
    return replace(on, noise=Noise(arguments.jitter, slow)) if slow or arguments.jitter else on


def _check_noise(plan: Plan) -> None:
    """Raises UserError if the plan has ranks that are slow, but no such ranks."""
    noise = plan.on.noise
    if noise is None:
        return
    if not _has_passes(plan.runnable[0].config):
        raise UserError(f"--jitter, --slow: kind {plan.spec.kind} is predicted without them")
    smallest = min(trial.config.ring.size for trial in plan.runnable)
    if over := [rank for rank in noise.slow if rank >= smallest]:
        raise UserError(f"--slow: got rank {over[0]}, expected one of 0 to {smallest - 1}")


def _has_passes(config: TrialConfig) -> bool:
    """Tells whether a trial is passes of one ring: no step of decoding or of a training."""
    return config.problem.new_tokens is None and config.training is None


def _timeline(plan: Plan) -> str:
    """Returns the predicted trace of the first trial, in the format of measured ones."""
    config = default_config(plan.runnable[0].config)
    if not _has_passes(config):
        raise UserError(f"--timeline: kind {plan.spec.kind} has none, expected passes of one ring")
    spans = cost_model.timelines(config, plan.on, _TIMELINES)
    return traces.text([RankReport(rank, spans=some) for rank, some in spans.items()])


def schema(arguments: argparse.Namespace) -> int:
    """Prints the JSON Schema of specs."""
    print(json.dumps(specs.json_schema(), indent=2))
    return 0


def _print(plan: Plan, price: float | None, everything: bool) -> None:
    from ringray.lab.cli.results import say, title  # with rich, which `validate` does not need
    from ringray.lab.report import tables

    spec, runnable = plan.spec, plan.runnable
    configs = [trial.config.as_dict() for trial in runnable]
    console = tables.console()
    title(console, spec.name, plan.digest, (spec.kind, ""))
    say(console, words.constants(configs[0], words.varying(configs)), words.measured(configs[0]))
    say(console, *words.predicted_for(plan))
    console.print()
    shown = runnable if everything else runnable[:_ROWS]
    tables.show(tables.plan_table(shown), console)
    if len(shown) < len(runnable):
        console.print(f"... and {units.plural(len(runnable) - len(shown), 'trial')} more (--all)")
    console.print()
    for line in words.pruned(plan):
        console.print(line, style="bright_black", markup=False, soft_wrap=True)
    say(console, _counted(plan, price), *words.warnings(plan))


def _counted(plan: Plan, price: float | None = None) -> str:
    """Writes ``16 trials; predicted: 4.1 s of measuring, 0.002 rank-hours, up to 12 MiB ...``."""
    pruned = len(plan.trials) - len(plan.runnable)
    trials = units.plural(len(plan.runnable), "trial")
    trials += f" and {pruned:,} pruned" if pruned else ""
    totals = _totals(plan, price)
    unit = "GPU" if plan.device == "cuda" else "rank"
    cost = "" if price is None else f" for {units.digits(totals['cost'])} at {price:g} each"
    return (
        f"{trials}; predicted: {units.duration(totals['measuring_s'])} of measuring, "
        f"{units.digits(totals['rank_hours'])} {unit}-hours{cost}, "
        f"up to {units.memory(totals['peak_memory_bytes'])} per rank, "
        f"{units.flops(totals['flops'])} and {units.memory(totals['sent_bytes'])} sent "
        "in one pass of each"
    )


def _totals(plan: Plan, price: float | None) -> dict[str, Any]:
    shares = forecast.shares(plan.spec, plan.runnable)
    pairs = zip(shares, plan.runnable, strict=True)
    takes = [share * trial.measuring_s for share, trial in pairs]
    sizes = (trial.config.ring.size for trial in plan.runnable)
    hours = sum(s * ranks for s, ranks in zip(takes, sizes, strict=True)) / 3600
    costs = [trial.predicted for trial in plan.runnable if trial.predicted]
    return {
        "trials": len(plan.runnable),
        "pruned": len(plan.trials) - len(plan.runnable),
        "measuring_s": sum(takes),
        "rank_hours": hours,
        **({} if price is None else {"cost": hours * price}),
        "peak_memory_bytes": max(cost.peak_memory_bytes for cost in costs),
        "flops": sum(cost.flops for cost in costs),
        "sent_bytes": sum(cost.sent_bytes for cost in costs),
        "outer_bytes": sum(cost.outer_bytes for cost in costs),
    }


def _as_json(plan: Plan, price: float | None) -> dict[str, Any]:
    return {
        "name": plan.spec.name,
        "kind": plan.spec.kind,
        "sweep": plan.digest,
        "on": str(plan.on) if plan.named else None,
        "fitted_trials": plan.on.hardware.fitted,
        "links": plan.on.linked or None,
        "spec": public_spec(plan.spec.canonical()),
        "totals": _totals(plan, price),
        "trials": [trial_dict(trial) for trial in plan.trials],
    }
