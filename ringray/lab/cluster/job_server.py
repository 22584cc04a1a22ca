"""Ray's job server at a head's dashboard: its address, its answers, and in words its refusals."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ringray.base.errors import PlaceError, UserError
from ringray.base.redaction import shown
from ringray.lab.cluster import access

if TYPE_CHECKING:
    from collections.abc import Iterator

PROBE_S = 5.0  # for the address to answer
CALL_S = 60.0  # for one request; an upload is one
_EXAMPLE = "http://HOST:8265, the dashboard of the cluster's head"
_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_TALKERS = (  # of each upload and each connection
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)


def address(given: str | None) -> str:
    """The job server's URL: ``given``, else what Ray's own variables say.

    Raises:
        UserError: there is none, or it is no URL of a dashboard.
    """
    url = given
    for name in _ADDRESSES:
        there = os.environ.get(name, "")
        if not url and there.startswith(("http://", "https://")):
            url = there
    if not url:
        raise UserError(
            f"no cluster to submit to; give --address {_EXAMPLE}, or set RAY_API_SERVER_ADDRESS"
        )
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        if "@" in parts.netloc:
            raise UserError(
                f"--address {shown(url)}: a password has no place in it; RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH holds the cluster's token"
            )
    except ValueError:
        good = False
    if not good or any(character.isspace() for character in url):
        raise UserError(f"--address {url}: not the URL of a job server, which is {_EXAMPLE}")
    return url.rstrip("/")


def connect(url: str) -> Any:
    """Ray's ``JobSubmissionClient`` for ``url``, checked to be answered and let in.

    Raises:
        PlaceError: nobody answers, or not Ray; the token is missing or wrong; Ray there is too old.
    """
    _probe(url)
    access.use_given_token()
    from ray.job_submission import JobSubmissionClient

    for name in _TALKERS:
        logging.getLogger(name).setLevel(logging.ERROR)

    class Client(JobSubmissionClient):
        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            return super()._do_request(*arguments, **{"timeout": CALL_S, **options})

    # Ray would prefer its variables to the address that it is given.
    aside = {name: os.environ.pop(name) for name in _ADDRESSES if name in os.environ}
    try:
        with answering(url):
            return Client(url)
    finally:
        os.environ.update(aside)


@contextlib.contextmanager
def answering(url: str) -> Iterator[None]:
    """Turns what Ray's client raises into PlaceError."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        raise PlaceError(_unauthenticated(url, error.message)) from None
    except OSError as error:  # requests' errors are
        raise PlaceError(f"the Ray at {url} does not answer any more: {error}") from error
    except RuntimeError as error:
        raise PlaceError(f"the Ray at {url} refuses: {_last_line(error)}") from error


def _probe(url: str) -> None:
    """PlaceError unless Ray's dashboard answers; Ray's client itself would wait for ever."""
    try:
        with urllib.request.urlopen(f"{url}/api/version", timeout=PROBE_S) as answer:
            found = json.loads(answer.read(1 << 16))
        if not isinstance(found, dict) or "ray_version" not in found:
            raise ValueError("it answers as something else")
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):  # who is let in is asked with the token
            raise PlaceError(_unknown(url, f"HTTP status {error.code}")) from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise PlaceError(
            f"no Ray answers at {url}: {reason}; expected {_EXAMPLE}. "
            "`ray start --head` starts it, from another machine it needs --dashboard-host"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlaceError(_unknown(url, str(error))) from None


def _unknown(url: str, why: str) -> str:
    return f"what answers at {url} is no Ray dashboard: {why}; expected {_EXAMPLE}"


def _unauthenticated(url: str, message: str) -> str:
    if message.startswith(("Authentication failed", "Authentication required")):
        return access.refused_token(url)
    return access.no_token(url, message)


def _last_line(error: BaseException) -> str:
    """A server's refusal is a whole traceback; its last line says what it is."""
    lines = [line.strip(" .") for line in str(error).splitlines() if line.strip(" .")]
    return lines[-1] if lines else type(error).__name__
