"""A command of ringray on the head of a cluster, for what only its store knows: a small job of its
own, which is deleted when its output has been read, or is no longer wanted."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from ringray.base.errors import PlaceError, UserError
from ringray.base.redaction import plain
from ringray.lab.cluster import job_server, jobs
from ringray.lab.cluster.job_package import Shipment
from ringray.lab.cluster.job_server import answering
from ringray.lab.cluster.jobs import ENDED, POLL_S, JobLog

ASK_S = 120.0  # seconds for the head to start the job and to answer
_PAUSE_S, PAUSE_MOST_S = 1.0, 30.0  # seconds before connecting again: at first, at most
_END_S = 5.0  # seconds for a command to end
_MONITOR_S = 1.5  # seconds in which Ray notes the end of a stopped job, even of a deleted one
_ERROR = "ringray: error: "
# Lines of Ray's in the log of a job.
_RAYS = re.compile(
    r"\d{4}-\d\d-\d\d [\d:,]+\s+(INFO|WARNING) \S+\.py:\d+ -- |Running entrypoint for job "
)


Note = Callable[[str], None]


class RemoteCommand:
    """``ringray COMMAND`` as a job on the head that ``client`` speaks to."""

    def __init__(self, client: Any, shipment: Shipment, *command: str) -> None:
        self._client, self.name = client, f"ringray-ask-{secrets.token_hex(6)}"
        jobs.start(client, self.name, shipment, command)

    def ended(self) -> bool:
        """Returns whether it has ended, or is not known any more: the head was started again."""
        try:
            return self._client.get_job_info(self.name).status in ENDED
        except RuntimeError as error:
            if "does not exist" in str(error):
                return True
            raise

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end; returns whether it came within ``seconds``."""
        until = time.monotonic() + seconds
        while not (ended := self.ended()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return ended

    def remove(self) -> None:
        """Ends and deletes it; raises nothing, as it ends by itself."""
        with contextlib.suppress(Exception):  # of many types
            if not self.ended():
                self._client.stop_job(self.name)
                self.ends_within(_END_S)
                time.sleep(_MONITOR_S)
            self._client.delete_job(self.name)


def ask(client: Any, url: str, shipment: Shipment, *command: str) -> str:
    """Returns what ``ringray COMMAND`` prints on the head of ``url``, without control characters.

    Raises:
        PlaceError: the head does not answer, or the command fails there; with its last line.
    """
    with answering(url):
        remote = RemoteCommand(client, shipment, *command)
        try:
            if not remote.ends_within(ASK_S):
                raise PlaceError(f"the head of {url} gave no answer in {ASK_S:.0f} s")
            job = client.get_job_info(remote.name)
            text = plain(client.get_job_logs(remote.name))
        finally:
            remote.remove()
    lines = [line for line in text.splitlines() if not _RAYS.match(line)]
    if job.status != "SUCCEEDED":
        why = lines[-1].removeprefix(_ERROR) if lines else job.message
        raise PlaceError(f"`ringray {command[0]}` failed on the head of {url}: {why}")
    return "".join(f"{line}\n" for line in lines)


def follow(
    url: str, shipment: Shipment, take: Callable[[str], bool], note: Note, *command: str
) -> None:
    """Passes the JSON lines that ``ringray COMMAND`` prints on the head of ``url`` to ``take``
    until that returns True. Connects again after ever longer pauses, of which ``note`` is told;
    starts the command anew if it has ended meanwhile.

    Raises:
        UserError: the command refuses.
        PlaceError: the head refuses it at first.
    """
    client = job_server.connect(url)
    pause, over, rest, heard = _PAUSE_S, False, "", False
    remote: RemoteCommand | None = None
    log: JobLog | None = None

    def write(text: str) -> None:
        nonlocal rest, over, pause, heard
        pause = _PAUSE_S
        *lines, rest = (rest + text).split("\n")
        for line in map(plain, lines):
            if line.startswith(_ERROR):
                raise UserError(line.removeprefix(_ERROR))
            if not over and line.startswith("{"):  # others are Ray's, or warnings
                heard, over = True, take(line)

    try:
        while not over:
            quiet = False
            try:
                with answering(url):
                    if remote is None or log is None or remote.ended():
                        remote, rest = RemoteCommand(client, shipment, *command), ""
                        log = JobLog(client, remote.name, write)
                    quiet = not log.follow()
                    if not heard and remote.ended():
                        why = client.get_job_info(remote.name).message
                        failed = f"`ringray {command[0]}` failed on the head of {url}"
                        raise UserError(f"{failed}: {why}")
            except PlaceError as error:
                if remote is None:
                    raise
                note(f"{error}; trying again in {pause:.0f} s")
            if not over and not quiet:
                time.sleep(pause)
                pause = min(2 * pause, PAUSE_MOST_S)
    finally:
        if remote is not None:
            remote.remove()
