"""The watch over a connected Ray, which ends a sweep whose Ray has ended.

Ray's own calls wait for a control plane that is gone, and after a minute Ray ends the process, as a
crash does. So the main thread is interrupted before that, as by Ctrl-C, and ends in order; a second
later than it may take, the process ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from ringray.base import deadline
from ringray.base.errors import ClusterError
from ringray.base.signals import quit_at_once

LOOK_S = 2.0  # seconds between two looks
LOST_S = 20.0  # seconds without a sign of life of a cluster; Ray itself waits for 60
END_S = 30.0  # seconds for the main thread to end in order


class ClusterWatch:
    """Looks whether Ray ``lives``, from a thread, until ``end``. ``name``: of it, for messages;
    ``patience``: seconds without a sign of life; ``reason``: says why it has ended, if it can."""

    def __init__(
        self, name: str, lives: Callable[[], bool], patience: float, reason: Callable[[], str] = str
    ) -> None:
        self._name, self._lives, self._patience, self._reason = name, lives, patience, reason
        self._error: ClusterError | None = None  # once Ray is lost
        self._ended = threading.Event()
        # Python handles signals in its main thread only.
        self._main = threading.current_thread() is threading.main_thread()
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def end(self) -> None:
        """Ends the watch.

        Raises:
            ClusterError: Ray was lost.
        """
        self._ended.set()
        if self._error is not None:
            raise self._error

    def _look(self) -> None:
        seen = time.monotonic()
        while not self._ended.wait(LOOK_S):
            if self._lives():
                seen = time.monotonic()
            elif time.monotonic() - seen >= self._patience:
                break
        if self._ended.is_set() or not self._main:
            return
        why = self._reason()
        self._error = error = ClusterError(
            f"{self._name} has ended or no longer answers{why and f': {why}'}; what was measured "
            "is kept, and `ringray resume SWEEP` continues"
        )
        if signal.getsignal(signal.SIGINT) is not quit_at_once:  # it ends already
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not self._ended.wait(END_S):
            deadline.say(f"error: {error}")
            os._exit(error.exit_code)
