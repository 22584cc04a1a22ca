"""One request to a server that may be silent, slow or no server at all: a deadline for the whole.

A server that sends a byte now and then, or one interim answer after another, defeats the time-out
of a socket, which counts from the last byte: the thread of its request is left behind. Imports ssl,
which takes a while.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from ringray.base.deadline import within

MOST = 1 << 16  # bytes of an answer that are read


class Answer(NamedTuple):
    """``status`` and ``reason`` of the final answer, and the first ``MOST`` bytes of it."""

    status: int
    reason: str
    body: bytes


def get(url: str, seconds: float) -> Answer:
    """Returns the answer to a GET request, whatever its status, after redirections.

    Raises:
        OSError: no complete answer in ``seconds``, no connection, or no HTTP. The ``reason`` of a
            ``URLError`` may be the error beneath.
    """
    try:
        return within(seconds, url, _get, url, seconds)
    except (http.client.HTTPException, ValueError) as error:
        text = str(error).strip() or type(error).__name__
        raise OSError(f"its answer is {text[:80]!r}, not HTTP") from None


def _get(url: str, seconds: float) -> Answer:
    try:
        answer: Any = urllib.request.urlopen(url, timeout=seconds)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return Answer(answer.status, answer.reason, answer.read(MOST))
