"""A command of ringray on the head of a cluster, for what only its store knows: a small job of its
own, which is deleted when its output has been read, or is no longer wanted."""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ringray.base.errors import PlaceError, UserError
from ringray.base.redaction import plain
from ringray.lab.cluster import job_server
from ringray.lab.cluster.job_package import Shipment
from ringray.lab.cluster.job_server import answering
from ringray.lab.cluster.jobs import ENDED, POLL_S, RUNTIME_ENV, JobLog

ASK_S = 120.0  # seconds for the head to start the job and to answer
_PAUSE_S, PAUSE_MOST_S = 1.0, 30.0  # seconds before connecting again: at first, at most
_END_S = 5.0  # seconds for a command to end
_MONITOR_S = 1.5  # seconds in which Ray notes the end of a stopped job, even of a deleted one
_ERROR = "ringray: error: "
# Lines of Ray's in the log of a job.
_RAYS = re.compile(
    r"\d{4}-\d\d-\d\d [\d:,]+\s+(INFO|WARNING) \S+\.py:\d+ -- |Running entrypoint for job "
)


def ask(client: Any, url: str, shipment: Shipment, *command: str) -> str:
    """Returns what ``ringray COMMAND`` prints on the head of ``url``, without control characters.

    Raises:
        PlaceError: the head does not answer, or the command fails there; with its last line.
    """
    with answering(url):
        name = _start(client, shipment, *command)
        try:
            if not _ends(client, name, ASK_S):
                client.stop_job(name)
                raise PlaceError(f"the head of {url} gave no answer in {ASK_S:.0f} s")
            job = client.get_job_info(name)
            text = plain(client.get_job_logs(name))
        finally:
            with contextlib.suppress(RuntimeError):  # it still runs
                client.delete_job(name)
    lines = [line for line in text.splitlines() if not _RAYS.match(line)]
    if job.status != "SUCCEEDED":
        why = lines[-1].removeprefix(_ERROR) if lines else job.message
        raise PlaceError(f"`ringray {command[0]}` failed on the head of {url}: {why}")
    return "".join(f"{line}\n" for line in lines)


Note = Callable[[str], None]


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
    name, pause, over, rest, heard = "", _PAUSE_S, False, "", False
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
            try:
                with answering(url):
                    if log is None or _gone(client, name):
                        name, rest = _start(client, shipment, *command), ""
                        log = JobLog(client, name, write, partial(_gone, client, name))
                    log.follow()
                    if not heard and _gone(client, name):
                        why = client.get_job_info(name).message
                        failed = f"`ringray {command[0]}` failed on the head of {url}"
                        raise UserError(f"{failed}: {why}")
            except PlaceError as error:
                if not name:
                    raise
                note(f"{error}; trying again in {pause:.0f} s")
            if not over:
                time.sleep(pause)
                pause = min(2 * pause, PAUSE_MOST_S)
    finally:
        if name:
            with contextlib.suppress(Exception):  # of many types; the command ends by itself
                _remove(client, name)


def _remove(client: Any, name: str) -> None:
    """Ends a job and deletes it."""
    if not _gone(client, name):
        client.stop_job(name)
        _ends(client, name, _END_S)
        time.sleep(_MONITOR_S)
    client.delete_job(name)


def _start(client: Any, shipment: Shipment, *command: str) -> str:
    """Starts a command as a job and returns its name."""
    name = f"ringray-ask-{secrets.token_hex(6)}"
    client.submit_job(
        entrypoint=shlex.join(["python", "-m", "ringray", *command]),
        submission_id=name,
        runtime_env={**RUNTIME_ENV, "working_dir": str(shipment.folder)},
        entrypoint_num_cpus=0,
    )
    return name


def _gone(client: Any, name: str) -> bool:
    """Returns whether a job has ended, or is not known any more: the head was started again."""
    try:
        return client.get_job_info(name).status in ENDED
    except RuntimeError as error:
        if "does not exist" in str(error):
            return True
        raise


def _ends(client: Any, name: str, seconds: float) -> bool:
    """Waits until a job has ended; returns whether it has within ``seconds``."""
    until = time.monotonic() + seconds
    while not (gone := _gone(client, name)) and time.monotonic() < until:
        time.sleep(POLL_S)
    return gone
