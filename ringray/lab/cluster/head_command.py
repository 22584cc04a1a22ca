"""A command of ringray as a job on the head of a cluster: how it is sent, followed and ended."""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ringray.base.deadline import WaitNotice
from ringray.base.errors import PlaceError, reason_of
from ringray.base.redaction import plain
from ringray.lab.cluster import job_server
from ringray.lab.cluster.job_package import Shipment
from ringray.lab.cluster.job_server import answering

STOP_WAIT_S = 60  # seconds for a sweep to end by itself before Ray kills its driver
# cluster/runtime_env.yaml has the same for `ray job submit`.
RUNTIME_ENV: dict[str, Any] = {
    "env_vars": {"PYTHONPATH": "kernels", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
}
ENDED = ("SUCCEEDED", "STOPPED", "FAILED")
POLL_S = 0.5  # seconds between two looks at a job
QUIET_S = 8.0  # seconds without output before a follower asks for the state of the job
LOST_S = 60.0  # seconds without an answer before a follower gives up
_END_S = 5.0  # seconds for a command that only reads to end
_MONITOR_S = 1.5  # seconds in which Ray notes the end of a stopped job, even of a deleted one
_ERROR = "ringray: error: "
# Lines of Ray's in the log of a job.
_RAYS = re.compile(
    r"\d{4}-\d\d-\d\d [\d:,]+\s+(INFO|WARNING) \S+\.py:\d+ -- |Running entrypoint for job "
)


class RemoteCommand:
    """The job ``id`` at the job server ``url``. ``client`` is Ray's ``JobSubmissionClient``.

    Every method raises PlaceError when the job server does not answer or refuses.
    """

    def __init__(self, client: Any, url: str, id: str) -> None:
        self._client, self.url, self.id = client, url, id

    def start(self, shipment: Shipment, command: Sequence[str], **metadata: str) -> bool:
        """Starts ``ringray COMMAND``; returns False if there is a job of that id."""
        with answering(self.url):
            try:
                self._client.submit_job(
                    entrypoint=shlex.join(["python", "-m", "ringray", *command]),
                    submission_id=self.id,
                    runtime_env={**RUNTIME_ENV, "working_dir": str(shipment.folder)},
                    metadata=metadata,
                    entrypoint_num_cpus=0,  # a head without CPUs must hold it
                )
            except RuntimeError as error:
                if "already exists" in str(error):
                    return False
                raise
        return True

    def details(self) -> Any:
        """Returns its state as Ray describes it."""
        with answering(self.url):
            return self._client.get_job_info(self.id)

    def stop(self, seconds: float) -> Any:
        """Stops it as Ctrl-C does, and waits for its end; PlaceError if it goes on."""
        until, reminder = time.monotonic() + seconds, WaitNotice()
        with answering(self.url):
            self._client.stop_job(self.id)
        while (job := self.details()).status not in ENDED:
            if time.monotonic() > until:
                raise PlaceError(f"job {self.id} at {self.url} does not stop: {job.message}")
            reminder(f"the end of job {self.id}")
            time.sleep(POLL_S)
        return job

    def remove(self) -> None:
        """Ends and deletes it; raises nothing, as it ends by itself."""
        with suppress(Exception):  # of many types
            if self.details().status not in ENDED:
                self.stop(_END_S)
                time.sleep(_MONITOR_S)
            self._client.delete_job(self.id)

    def follow(self, write: Callable[[str], None]) -> Any:
        """Passes the output to ``write`` from its beginning; returns the state when it has ended.

        Connects again if the connection breaks; output that was written is not repeated. If none
        comes, says the state of the job.
        """
        reminder, answered, seen = WaitNotice(), time.monotonic(), 0

        def take(text: str, received: int) -> None:
            nonlocal answered, seen
            # Each connection repeats the log from its beginning.
            if received > seen:
                answered = time.monotonic()
                reminder.heard()
                write(text[seen - received :])
                seen = received

        while True:
            try:
                asyncio.run(self._tail(take))
                job = self.details()
            except PlaceError as error:
                if time.monotonic() - answered > LOST_S:
                    raise PlaceError(
                        f"no answer from {self.url} for {LOST_S:.0f} s, where job {self.id} may "
                        f"still run: {error}"
                    ) from error
                state = "whose log cannot be read"  # and what is known of the job may be old
            else:
                if job.status in ENDED:
                    return job
                answered, state = time.monotonic(), f"which is {job.status}"
            reminder(f"job {self.id} at {self.url}, {state}")
            time.sleep(POLL_S)

    async def _tail(self, take: Callable[[str, int], None]) -> None:
        """Passes texts of one connection on, with the characters so far, until its end or nothing
        has come for ``QUIET_S``: the job may have ended while the connection stays open."""
        received, chunks = 0, self._client.tail_job_logs(self.id)
        while True:
            try:
                # Unlike wait_for, it makes no task whose error would be lost if both end at once.
                async with asyncio.timeout(QUIET_S):
                    text = await anext(chunks)
            except (StopAsyncIteration, TimeoutError):
                return
            except Exception as error:  # from Ray, aiohttp and the system
                # Ctrl-C cancels this task, which a client may report as a broken connection.
                if (task := asyncio.current_task()) and task.cancelling():
                    raise asyncio.CancelledError from error
                raise PlaceError(reason_of(error)) from error
            received += len(text)
            take(text, received)


def ask(url: str, shipment: Shipment, *command: str) -> str:
    """Returns what ``ringray COMMAND`` prints on the head of ``url``, without control characters.

    Raises:
        PlaceError: the head does not answer, or the command fails there; with its last line.
    """
    texts: list[str] = []
    with _short(url, shipment, command) as remote:
        job = remote.follow(texts.append)
    lines = [line for line in plain("".join(texts)).splitlines() if not _RAYS.match(line)]
    if job.status != "SUCCEEDED":
        why = lines[-1].removeprefix(_ERROR) if lines else job.message
        raise PlaceError(f"`ringray {command[0]}` failed on the head of {url}: {why}")
    return "".join(f"{line}\n" for line in lines)


def events(url: str, shipment: Shipment, take: Callable[[str], bool], *command: str) -> None:
    """Passes the JSON lines that ``ringray COMMAND`` prints on the head of ``url`` to ``take``
    until that returns True; starts the command anew if it has ended before.

    Raises:
        PlaceError: the head does not answer, or the command fails there; with its last line.
    """
    over, last, rest = False, "", ""

    def write(text: str) -> None:
        nonlocal over, last, rest
        *lines, rest = (rest + text).split("\n")
        for line in map(plain, lines):
            if line.startswith("{"):  # others are Ray's, or warnings
                over = over or take(line)
            elif line.startswith(_ERROR):
                last = line.removeprefix(_ERROR)

    while not over:
        rest = ""
        with _short(url, shipment, command) as remote:
            job = remote.follow(write)
        if job.status != "SUCCEEDED":
            why = last or job.message
            raise PlaceError(f"`ringray {command[0]}` failed on the head of {url}: {why}")


@contextmanager
def _short(url: str, shipment: Shipment, command: Sequence[str]) -> Iterator[RemoteCommand]:
    """Starts a command that only reads; deletes its job at the end of the block."""
    remote = RemoteCommand(job_server.connect(url), url, f"ringray-ask-{secrets.token_hex(6)}")
    remote.start(shipment, command)
    try:
        yield remote
    finally:
        remote.remove()
