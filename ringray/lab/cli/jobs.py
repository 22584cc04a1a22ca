"""``submit`` and ``stop``: a sweep as a job of a Ray cluster."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TextIO

from ringray.base import provenance, units
from ringray.base.errors import PlaceError, UserError
from ringray.base.redaction import has_password, plain
from ringray.lab.cli.options import DASHBOARD, FORCE, JSON, SET, SPEC, Option, append, options
from ringray.lab.cluster import head_command, job_package, job_server
from ringray.lab.cluster.jobs import INTERRUPTED, Job, Jobs
from ringray.lab.plan.plan import build
from ringray.lab.specs import model as specs

_DETACH = "return when the cluster has it; do not follow"
_HEAD_STORE = "store file on the head (default: the head's own store)"


@options(
    *(SPEC, SET, DASHBOARD, Option("--detach", action="store_true", help=_DETACH)),
    *(Option("--store", metavar="F", help=_HEAD_STORE), JSON, FORCE),
)
def submit(arguments: argparse.Namespace) -> int:
    """Sends a sweep to a cluster, unless it runs there, and follows it; returns its exit code."""
    spec = specs.load(arguments.spec, arguments.set)
    plan = build(spec, processes=provenance.cores(), everything=arguments.all)
    if has_password(plan.spec.tracking.uri or ""):
        raise plan.spec.error(
            "tracking.uri",
            "has a password, which every user who may read the cluster's jobs could read; "
            "set MLFLOW_TRACKING_URI on the head instead",
        )
    if arguments.json is not None and arguments.detach:
        raise UserError(
            "argument --json: not allowed with argument --detach; "
            "`ringray status SWEEP --address URL --json F` fetches the results later"
        )
    store = store_option(arguments)
    if arguments.json not in (None, "-"):
        append(arguments.json, "")
    url = job_server.address(arguments.address)
    here = Jobs(job_server.connect(url), url)
    changes = "".join(f" --set {shlex.quote(change)}" for change in arguments.set)
    again = f"ringray submit {arguments.spec} --address {url}{changes}"
    with job_package.packed(plan.spec) as shipment:
        job, started = here.submit(plan, shipment, arguments.store)
    called = f"{plan.spec.name} {plan.digest[:12]}"
    screen = sys.stderr if arguments.json == "-" else sys.stdout
    if started:
        size = units.memory(shipment.size)
        print(f"{called}: job {job.id} at {url}, {size} of source", file=screen)
    else:
        print(f"{called}: job {job.id} runs already at {url}", file=screen)
        if job.code != provenance.code_digest():
            stops = f"`ringray stop {plan.digest[:12]} --address {url}`"
            text = f"it runs different source; to run this one: {stops}, then submit again"
            print(text, file=screen)
    ways = f"follow: {again}\nstop:   ringray stop {plan.spec.name} --address {url}"
    if arguments.detach:
        print(ways)
        return 0
    screen.flush()
    try:
        job = here.follow(job, partial(_write, screen))
    except KeyboardInterrupt:
        print(f"\ndetached; job {job.id} continues\n{ways}", file=screen)
        return INTERRUPTED
    if arguments.json is not None and job.obstacle is None:
        append(arguments.json, fetch(url, "status", plan.digest, "--json", "-", *store))
    return _end(job, again, screen)


def store_option(arguments: argparse.Namespace) -> list[str]:
    """Returns the option for the store on the head."""
    return [] if arguments.store is None else ["--store", arguments.store]


def on_head(arguments: argparse.Namespace, *command: str) -> None:
    """Prints what a command that reads the store prints on the head of ``--address``."""
    json = getattr(arguments, "json", None)
    switches = [*store_option(arguments), *(["--json", "-"] if json else [])]
    text = fetch(arguments.address, *command, *switches)
    if json:
        append(json, text)
    else:
        sys.stdout.write(text)


def fetch(address: str, *command: str) -> str:
    """Returns what a command prints on the head of a cluster."""
    url = job_server.address(address)
    with job_package.packed() as shipment:
        return head_command.ask(url, shipment, *command)


_SWEEP = Option("sweep", metavar="SWEEP", help="name, the start of its digest, or its spec")


@options(_SWEEP, DASHBOARD)
def stop(arguments: argparse.Namespace) -> int:
    """Ends the running job of a sweep; its results are kept, and it can be resumed."""
    selector = arguments.sweep
    if Path(selector).suffix in (".yaml", ".yml"):
        selector = specs.load(selector).digest
    url = job_server.address(arguments.address)
    here = Jobs(job_server.connect(url), url)
    job = here.find(selector)
    called = f"{job.name} {job.digest[:12]}: job {job.id}"
    if job.ended:
        print(f"{called} has ended already: {job.ending()[1]}")
        return 0
    print(f"{called}: stopping", flush=True)
    job = here.stop(job)
    print(f"{called}: {job.ending()[1]}; `ringray submit SPEC --address {url}` continues it")
    return 0


def _write(screen: TextIO, text: str) -> None:
    screen.write(plain(text))  # a job may write control characters
    screen.flush()


def _end(job: Job, again: str, screen: TextIO) -> int:
    """Prints how a job ended; returns the exit code."""
    code, how = job.ending()
    if job.obstacle is not None:
        raise PlaceError(f"job {job.id} {how}")
    print(f"job {job.id}: {how}", file=screen)
    if code == INTERRUPTED:
        print(f"to continue it: {again}", file=screen)
    elif code == 1:
        print(f"to repeat the failed trials: {again}", file=screen)
    return code
