"""A sweep as a Ray job: its name, how it is sent once, followed and stopped, and how it ends.

A job is named by the sweep's digest and an attempt, and Ray accepts a name once. So two submits at
the same moment make one job, and the second one follows it. Results are in the store on the head,
as for ``ringray run``: a further attempt continues from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringray.base import provenance
from ringray.base.errors import PlaceError, UserError
from ringray.lab.cluster.head_command import ENDED, LOST_S, STOP_WAIT_S, RemoteCommand
from ringray.lab.cluster.job_package import Shipment
from ringray.lab.cluster.job_server import answering
from ringray.lab.plan.plan import Plan
from ringray.lab.specs.model import NAME
from ringray.lab.trial.outcome import selected

INTERRUPTED = 130
_ID = re.compile(r"ringray-([0-9a-f]{12})-([1-9][0-9]{0,8})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TRIES = 5  # attempts to submit while other processes do the same
_KILLED = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE")
_WORDS = {
    0: "complete",
    1: "failed",
    2: "refused",
    3: "lost its Ray",
    4: "stopped",
    INTERRUPTED: "interrupted",
}
_NO_COMMAND = (126, 127)  # exit codes of a shell that cannot start a command


@dataclass(frozen=True)
class Job:
    """One attempt at a sweep on a cluster, as Ray's job server reports it."""

    id: str
    digest: str  # of the sweep
    name: str  # of the sweep
    attempt: int
    code: str  # digest of the source that it runs
    # The others are Ray's.
    status: str
    exit_code: int | None = None
    error: str | None = None
    message: str = ""

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def obstacle(self) -> str | None:
        """The reason if it ended before it ran the sweep, else None."""
        if self.status != "FAILED":
            return None
        if self.exit_code in _NO_COMMAND:
            return (
                "the head of the cluster finds no `python`; start Ray there from the environment "
                "that has ringray's requirements"
            )
        if self.exit_code is None and self.error not in _KILLED:
            return self.message.strip() or "Ray gives no reason"
        return None

    def ending(self) -> tuple[int, str]:
        """Returns the exit code of the sweep and how the job ended, in words."""
        assert self.ended
        if self.obstacle is not None:
            return 2, f"could not start: {self.obstacle}"
        if self.status == "STOPPED":
            return INTERRUPTED, "stopped"
        code = 0 if self.status == "SUCCEEDED" else self.exit_code
        if code is None:
            return INTERRUPTED, "its driver was killed"
        if code in _WORDS:
            return code, _WORDS[code]
        if code < 0 or code > 128:  # as subprocess or a shell reports a signal
            return INTERRUPTED, f"its driver was killed: exit code {code}"
        return 1, f"failed with exit code {code}"


class Jobs:
    """ringray's jobs on one cluster. ``client`` is Ray's ``JobSubmissionClient``.

    Every method raises PlaceError when the job server does not answer or refuses.
    """

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self.url = url

    def all(self) -> list[Job]:
        """Returns every job that ``submit`` made here, the oldest attempt of a sweep first."""
        with answering(self.url):
            ours = [job for job in map(_job, self._client.list_jobs()) if job is not None]
        return sorted(ours, key=lambda job: (job.name, job.digest, job.attempt))

    def submit(self, plan: Plan, shipment: Shipment, store: str | None = None) -> tuple[Job, bool]:
        """Returns the running job of the sweep, and whether this call started it.

        Args:
            shipment: the source to send if there is no job yet.
            store: the store file there; by default the store of the head.
        """
        # Tuned choices are kept on the cluster.
        command = ["tune" if plan.spec.trial_kind.tunes else "run", shipment.spec]
        command += ["--store", store] if store else []
        command += ["--all"] if plan.everything else []
        for _ in range(_TRIES):
            same = [job for job in self.all() if job.digest == plan.digest]
            running = [job for job in same if not job.ended]
            if running:
                return running[-1], False
            attempt = 1 + max((job.attempt for job in same), default=0)
            name, code = f"ringray-{plan.digest[:12]}-{attempt}", provenance.code_digest()
            described = {"sweep": plan.digest, "name": plan.spec.name, "code": code}
            if self._remote(name).start(shipment, command, **described):
                return Job(name, plan.digest, plan.spec.name, attempt, code, "PENDING"), True
        raise PlaceError(
            f"names like ringray-{plan.digest[:12]}-1 are taken at {self.url} by jobs that are not "
            "of this sweep; `ray job delete` removes them"
        )

    def find(self, selector: str) -> Job:
        """Returns the running job, else the last one, of a sweep by name or start of its digest.

        Raises:
            UserError: there is none, or several such sweeps run.
        """
        jobs = self.all()
        digests = selected(selector, [(job.name, job.digest) for job in jobs])
        matches = [job for job in jobs if job.digest in digests]
        if not matches:
            names = sorted({job.name for job in jobs if not job.ended})
            others = f"running there: {', '.join(names)}" if names else "no sweep runs there"
            raise UserError(f"no job at {self.url} is of a sweep {selector!r}; {others}")
        running = [job for job in matches if not job.ended]
        if len({job.digest for job in running}) > 1:
            several = ", ".join(job.digest[:12] for job in running)
            raise UserError(f"sweep {selector!r} is not unique: {several}; name one of these")
        return (running or matches)[-1]

    def stop(self, job: Job) -> Job:
        """Stops a job as Ctrl-C stops a sweep, so that it can be resumed; waits for its end."""
        return _again(job, self._remote(job.id).stop(STOP_WAIT_S + LOST_S))

    def follow(self, job: Job, write: Callable[[str], None]) -> Job:
        """Passes the job's output to ``write`` from its beginning until the job has ended."""
        return _again(job, self._remote(job.id).follow(write))

    def _remote(self, id: str) -> RemoteCommand:
        return RemoteCommand(self._client, self.url, id)


def _again(job: Job, details: Any) -> Job:
    """Returns a job with the state that Ray's answer gives it."""
    if (now := _job(details)) is None or now.id != job.id:
        raise PlaceError(f"Ray describes another job than {job.id}")
    return now


def _job(details: Any) -> Job | None:
    """Parses Ray's answer; None for a job that ``submit`` did not make. Any user of the cluster can
    put any metadata there."""
    metadata = details.metadata if isinstance(details.metadata, dict) else {}
    match = _ID.fullmatch(details.submission_id or "")
    sweep, name = str(metadata.get("sweep", "")), str(metadata.get("name", ""))
    if match is None or not sweep.startswith(match[1]):
        return None
    if not _DIGEST.fullmatch(sweep) or not re.fullmatch(NAME, name):
        return None
    code, attempt = str(metadata.get("code", "")), int(match[2])
    end = details.driver_exit_code, details.error_type, details.message or ""
    return Job(match[0], sweep, name, attempt, code, str(details.status), *end)
