"""A process that imports MLflow in place of its driver, and the connection between the two.

MLflow takes seconds to import and competes with measurements, so that it runs in processes of its
own, with a log of their own. Driver and process exchange messages over a pair of connected sockets:
each side notices at once when the other has died, and no message is large enough to block its
sender.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ringray.base import private_files, provenance
from ringray.base.deadline import SAY_S, WaitNotice, within
from ringray.base.errors import PlaceError, RingrayError, reason_of
from ringray.base.redaction import TOKENS, hidden, shown
from ringray.lab.tracking.location import is_users_own
from ringray.lab.tracking.sink import service_of
from ringray.lab.trial.outcome import part_of_a_path

REQUEST_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"  # the variable with the seconds for one call
_LOG_BYTES = 1 << 20
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # MLflow's own retries take minutes and would hide an outage; the process retries by itself.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


def environment(uri: str, request_s: float) -> dict[str, str]:
    """Returns the variables for a process that uses MLflow at ``uri``, which may take ``request_s``
    seconds for each answer."""
    variables = _ENVIRONMENT | {REQUEST_TIMEOUT: str(int(request_s))}
    if service_of(uri) is None and not is_users_own(uri):
        variables["NETRC"] = os.devnull  # whose credentials MLflow's client would send
    return variables


class Worker:
    """The driver's end: a process that runs ``module`` and writes the log of ``name``. MLflow may
    take ``request_s`` seconds for each answer to it; ``uri`` is the place that it will use."""

    def __init__(self, name: str, module: str, request_s: float, uri: str) -> None:
        self.log_path = create_log(name)
        # The process does not speak to Ray and gets no token.
        variables = {key: value for key, value in os.environ.items() if key not in TOKENS}
        variables |= environment(uri, request_s)
        variables |= dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"], "1")
        paths = [str(provenance.packages()[0].parent), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-P", "-W", "ignore", "-m", module]
        ahead = getattr(service_of(uri), "__name__", "ringray.lab.tracking.mlflow_sink")
        self.connection, its_end = Pipe()
        with its_end, self.log_path.open("ab") as log_file:
            self.process = subprocess.Popen(
                # -P: the working directory is the user's and not a place to import from. Every
                # user of the machine can read the arguments: they hold nothing secret.
                [*command, str(its_end.fileno()), ahead],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=[its_end.fileno()],
                env=variables,
                # Ctrl-C in the terminal is for the driver; the process must still finish.
                start_new_session=True,
            )

    def end(self, patience: float = 2.0) -> str:
        """Kills the process unless it ends within ``patience`` seconds; returns how it ended."""
        self.connection.close()
        try:
            code = within(patience, "the last files in MLflow", self.process.wait)
        except TimeoutError:
            self.process.kill()
            code = self.process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def connection_to_driver() -> Connection:
    """Returns the other end, in the process that :class:`Worker` started."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


def send(connection: Connection, message: object) -> None:
    """Sends ``message``; if the other side has ended, the next :func:`receive` raises."""
    with suppress(OSError):
        connection.send(message)


def receive(connection: Connection, timeout: float) -> Any:
    """Returns the next message, or None if none comes within ``timeout`` seconds; says meanwhile
    what it waits for.

    Raises:
        EOFError: the other side has ended.
    """
    until, reminder = time.monotonic() + timeout, WaitNotice()
    try:
        while not connection.poll(max(0.0, min(SAY_S, until - time.monotonic()))):
            if time.monotonic() >= until:
                return None
            reminder("MLflow")
        return connection.recv()
    except OSError as error:  # reset: it ended before it had read everything
        raise EOFError from error


def create_log(name: str) -> Path:
    """Creates the log of the process if needed, and empties a large one."""
    folder = private_files.create_home() / "logs"
    path = folder / f"tracking-{part_of_a_path(name)[:12]}.log"
    try:
        private_files.folder(folder)
        private_files.create(path)
        if path.stat().st_size > _LOG_BYTES:
            os.truncate(path, 0)
    except OSError as error:
        raise PlaceError(
            f"the log {path} cannot be written: {reason_of(error)}; set RINGRAY_HOME to a folder "
            "that you may write to"
        ) from error
    return path


def log(text: str) -> None:
    """Writes ``text`` to the log, which is the standard error of the process."""
    with suppress(OSError):  # a full disk must not stop the process
        print(time.strftime("%Y-%m-%d %H:%M:%S"), hidden(text), file=sys.stderr, flush=True)


def brief(error: BaseException) -> str:
    """Returns an error as one line for the user, without credentials."""
    kind = type(error).__name__
    first = (str(error).strip() or kind).splitlines()[0]
    if not isinstance(error, RingrayError) and kind not in ("MlflowException", first):
        first = f"{kind}: {first}"
    return shown(first)[:500]
