"""A command of ringray on the head of a cluster, for what only its store knows: a small job of its
own, which is deleted when its output has been read."""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import time
from typing import Any

from ringray.base.errors import PlaceError
from ringray.base.redaction import plain
from ringray.lab.cluster.job_package import Shipment
from ringray.lab.cluster.job_server import answering
from ringray.lab.cluster.jobs import ENDED, POLL_S, RUNTIME_ENV

ASK_S = 120.0  # seconds for the head to start the job and to answer
# Lines of Ray's in the log of a job.
_RAYS = re.compile(
    r"\d{4}-\d\d-\d\d [\d:,]+\s+(INFO|WARNING) \S+\.py:\d+ -- |Running entrypoint for job "
)


def ask(client: Any, url: str, shipment: Shipment, *command: str) -> str:
    """Returns what ``ringray COMMAND`` prints on the head of ``url``, without control characters.

    Raises:
        PlaceError: the head does not answer, or the command fails there; with its last line.
    """
    name = f"ringray-ask-{secrets.token_hex(6)}"
    with answering(url):
        client.submit_job(
            entrypoint=shlex.join(["python", "-m", "ringray", *command]),
            submission_id=name,
            runtime_env={**RUNTIME_ENV, "working_dir": str(shipment.folder)},
            entrypoint_num_cpus=0,
        )
        try:
            found = _ended(client, url, name)
            text = plain(client.get_job_logs(name))
        finally:
            with contextlib.suppress(RuntimeError):  # it still runs
                client.delete_job(name)
    lines = [line for line in text.splitlines() if not _RAYS.match(line)]
    if _status(found) != "SUCCEEDED":
        why = lines[-1].removeprefix("ringray: error: ") if lines else found.message
        raise PlaceError(f"`ringray {command[0]}` failed on the head of {url}: {why}")
    return "".join(f"{line}\n" for line in lines)


def _ended(client: Any, url: str, name: str) -> Any:
    until = time.monotonic() + ASK_S
    while _status(found := client.get_job_info(name)) not in ENDED:
        if time.monotonic() > until:
            client.stop_job(name)
            raise PlaceError(f"the head of {url} gave no answer in {ASK_S:.0f} s")
        time.sleep(POLL_S)
    return found


def _status(found: Any) -> str:
    return str(getattr(found.status, "value", found.status))
