"""``submit`` and ``stop``: a sweep as a job of a Ray cluster."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ringray.base import provenance, units
from ringray.base.errors import PlaceError
from ringray.base.redaction import has_password, plain
from ringray.lab.cli.options import DASHBOARD, SPEC, Option, options
from ringray.lab.cluster import job_package, job_server
from ringray.lab.cluster.job_folder import check_absolute
from ringray.lab.cluster.jobs import INTERRUPTED, Job, Jobs
from ringray.lab.plan.plan import build
from ringray.lab.spec import model as specs
from ringray.lab.tracking import location


@options(
    SPEC, DASHBOARD,
    Option("--detach", action="store_true", help="return when the cluster has it; do not follow"),
    Option("--store", metavar="F", help="store file on the head (default: the head's own store)"),
)  # fmt: skip
def submit(arguments: argparse.Namespace) -> int:
    """Sends a sweep to a cluster, unless it runs there, and follows it; returns its exit code."""
    plan = build(specs.load(arguments.spec), processes=os.cpu_count() or 1)
    if has_password(plan.spec.tracking.uri or ""):
        raise plan.spec.error(
            "tracking.uri",
            "has a password, which every user who may read the cluster's jobs could read; "
            "set MLFLOW_TRACKING_URI on the head instead",
        )
    if arguments.store is not None:
        check_absolute("--store", arguments.store)
    if path := location.relative_path(plan.spec.tracking.uri or ""):
        check_absolute("tracking.uri", path)
    url = job_server.address(arguments.address)
    here = Jobs(job_server.connect(url), url)
    again = f"ringray submit {arguments.spec} --address {url}"
    with job_package.packed(plan.spec) as shipment:
        job, started = here.submit(plan, shipment, arguments.store)
    called = f"{plan.spec.name} {plan.digest[:12]}"
    if started:
        print(f"{called}: job {job.id} at {url}, {units.memory(shipment.size)} of source")
    else:
        print(f"{called}: job {job.id} runs already at {url}")
        if job.code != provenance.code_digest():
            print(
                "it runs different source; to run this one: "
                f"`ringray stop {plan.digest[:12]} --address {url}`, then submit again"
            )
    ways = f"follow: {again}\nstop:   ringray stop {plan.spec.name} --address {url}"
    if arguments.detach:
        print(ways)
        return 0
    sys.stdout.flush()
    try:
        job = here.follow(job, _write)
    except KeyboardInterrupt:
        print(f"\ndetached; job {job.id} continues")
        print(ways)
        return INTERRUPTED
    return _end(job, again)


@options(
    Option("sweep", metavar="SWEEP", help="name, the start of its digest, or its spec"), DASHBOARD
)
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


def _write(text: str) -> None:
    sys.stdout.write(plain(text))  # a job may write control characters
    sys.stdout.flush()


def _end(job: Job, again: str) -> int:
    """Prints how a job ended; returns the exit code."""
    code, how = job.ending()
    if job.obstacle is not None:
        raise PlaceError(f"job {job.id} {how}")
    print(f"job {job.id}: {how}")
    if code == INTERRUPTED:
        print(f"to continue it: {again}")
    elif code == 1:
        print(f"to repeat the failed trials: {again}")
    return code
