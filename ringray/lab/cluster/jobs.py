"""A sweep as a Ray job: its name, how it is sent once, followed and stopped, and how it ends.

A job is named by the sweep's digest and an attempt, and Ray accepts a name once. So two submits at
the same moment make one job, and the second one follows it. Results are in the store on the head,
as for ``ringray run``: a further attempt continues from there.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringray.base import provenance
from ringray.base.deadline import WaitNotice
from ringray.base.errors import PlaceError, UserError, reason_of
from ringray.lab.cluster.job_package import Shipment
from ringray.lab.cluster.job_server import answering
from ringray.lab.plan.plan import Plan
from ringray.lab.specs.model import NAME
from ringray.lab.trial.outcome import selected

STOP_WAIT_S = 60  # seconds for a sweep to end by itself before Ray kills its driver
# cluster/runtime_env.yaml has the same for `ray job submit`.
RUNTIME_ENV: dict[str, Any] = {
    "env_vars": {"PYTHONPATH": "kernels", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
}
INTERRUPTED = 130
POLL_S = 0.5  # seconds between two looks at a job
QUIET_S = 8.0  # seconds without output before a follower asks for the state of the job
LOST_S = 60.0  # seconds without an answer before a follower gives up
_ID = re.compile(r"ringray-([0-9a-f]{12})-([1-9][0-9]{0,8})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TRIES = 5  # attempts to submit while other processes do the same
ENDED = ("SUCCEEDED", "STOPPED", "FAILED")
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
            number = -code if code < 0 else code - 128
            return INTERRUPTED, f"its driver was killed by signal {number}"
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

    def get(self, job: Job) -> Job:
        """Returns the current state of a job."""
        with answering(self.url):
            now = _job(self._client.get_job_info(job.id))
        if now is None or now.id != job.id:
            raise PlaceError(f"the Ray at {self.url} describes another job than {job.id}")
        return now

    def submit(self, plan: Plan, shipment: Shipment, store: str | None = None) -> tuple[Job, bool]:
        """Returns the running job of the sweep, and whether this call started it.

        Args:
            shipment: the source to send if there is no job yet.
            store: the store file there; by default the store of the head.
        """
        for _ in range(_TRIES):
            same = [job for job in self.all() if job.digest == plan.digest]
            running = [job for job in same if not job.ended]
            if running:
                return running[-1], False
            attempt = 1 + max((job.attempt for job in same), default=0)
            name, code = f"ringray-{plan.digest[:12]}-{attempt}", provenance.code_digest()
            job = Job(name, plan.digest, plan.spec.name, attempt, code, "PENDING")
            if self._send(job, plan, shipment, store):
                return job, True
        raise PlaceError(
            f"names like ringray-{plan.digest[:12]}-1 are taken at {self.url} by jobs that are not "
            "of this sweep; `ray job delete` removes them"
        )

    def _send(self, job: Job, plan: Plan, shipment: Shipment, store: str | None) -> bool:
        """Submits the job; False if another job has the name."""
        # Tuned choices are kept on the cluster.
        verb = "tune" if plan.spec.trial_kind.tunes else "run"
        command = [verb, shipment.spec]
        command += ["--store", store] if store else []
        command += ["--all"] if plan.everything else []
        described = {"sweep": job.digest, "name": job.name, "code": job.code}
        with answering(self.url):
            try:
                start(self._client, job.id, shipment, command, **described)
            except RuntimeError as error:
                if "already exists" in str(error):
                    return False
                raise
        return True

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
        until, reminder = time.monotonic() + STOP_WAIT_S + LOST_S, WaitNotice()
        with answering(self.url):
            self._client.stop_job(job.id)
        while not (job := self.get(job)).ended:
            if time.monotonic() > until:
                raise PlaceError(f"job {job.id} at {self.url} does not stop: {job.message}")
            reminder(f"the end of job {job.id}")
            time.sleep(POLL_S)
        return job

    def follow(self, job: Job, write: Callable[[str], None]) -> Job:
        """Passes the job's output to ``write`` from its beginning until the job has ended.

        Connects again if the connection breaks; output that was written is not repeated. If none
        comes, says the state of the job.
        """
        reminder, answered = WaitNotice(), time.monotonic()

        def take(text: str) -> None:
            nonlocal answered
            answered = time.monotonic()
            reminder.heard()
            write(text)

        log = JobLog(self._client, job.id, take)
        while True:
            try:
                log.follow()
                job = self.get(job)
            except PlaceError as error:
                if time.monotonic() - answered > LOST_S:
                    raise PlaceError(
                        f"no answer from {self.url} for {LOST_S:.0f} s, where job {job.id} may "
                        f"still run: {error}"
                    ) from error
                state = "whose log cannot be read"  # and what is known of the job may be old
            else:
                if job.ended:
                    return job
                answered, state = time.monotonic(), f"which is {job.status}"
            reminder(f"job {job.id} at {self.url}, {state}")
            time.sleep(POLL_S)


def start(
    client: Any, job_id: str, shipment: Shipment, command: Sequence[str], **metadata: str
) -> None:
    """Starts ``ringray COMMAND`` as a job; RuntimeError if there is one of that id."""
    client.submit_job(
        entrypoint=shlex.join(["python", "-m", "ringray", *command]),
        submission_id=job_id,
        runtime_env={**RUNTIME_ENV, "working_dir": str(shipment.folder)},
        metadata=metadata,
        entrypoint_num_cpus=0,  # a head without CPUs must hold it
    )


class JobLog:
    """The log of a job, each part of which is passed to ``write`` once, however often the
    connection breaks."""

    def __init__(self, client: Any, id: str, write: Callable[[str], None]) -> None:
        self._client, self._id, self._write = client, id, write
        self._seen = 0  # characters

    def follow(self) -> bool:
        """Returns True at the end of the log, and False when nothing has come for ``QUIET_S``: the
        job may have ended while the connection stays open. PlaceError if the connection breaks."""
        return asyncio.run(self._tail())

    async def _tail(self) -> bool:
        received, chunks = 0, self._client.tail_job_logs(self._id)
        while True:
            try:
                text = await asyncio.wait_for(anext(chunks), QUIET_S)
            except StopAsyncIteration:
                return True
            except TimeoutError:
                return False
            except Exception as error:  # from Ray, aiohttp and the system
                raise PlaceError(reason_of(error)) from error
            received += len(text)  # each connection repeats the log from its beginning
            if received > self._seen:
                self._write(text[self._seen - received :])
                self._seen = received


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
