"""Ray's job server at a head's dashboard: its address, and messages for its refusals."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

from ringray.base.errors import PlaceError, UserError
from ringray.base.redaction import plain, shown
from ringray.lab.cluster import access, ray_private

PROBE_S = 5.0  # seconds for the address to answer
CALL_S = 60.0  # seconds for one request; an upload is one
_EXAMPLE = "http://HOST:8265, the dashboard of the cluster's head (6379 is its GCS)"
_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_URL = re.compile(r"https?://(?P<user>[^/]*@)?([^\s/:@]+|\[[\da-fA-F:]+\])(:\d+)?(/\S*)?")


def address(named: str | None) -> str:
    """Returns the job server's URL: the one ``named``, else that of Ray's own variables.

    Raises:
        UserError: there is none, or it is not the URL of a dashboard.
    """
    of_ray = (os.environ.get(name, "") for name in _ADDRESSES)
    url = named or next((url for url in of_ray if url.startswith("http")), None)
    if not url:
        advice = f"give --address {_EXAMPLE}, or set RAY_API_SERVER_ADDRESS"
        raise UserError(f"no cluster to submit to; {advice}")
    match = _URL.fullmatch(url)
    if match is None:
        raise UserError(f"--address {url}: not the URL of a job server, which is {_EXAMPLE}")
    if match["user"]:
        raise UserError(
            f"--address {shown(url)}: a password is not allowed here; RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH holds the cluster's token"
        )
    return url.rstrip("/")


def connect(url: str) -> Any:
    """Returns Ray's ``JobSubmissionClient`` for ``url``, after a first successful call.

    Raises:
        PlaceError: no server answers, or not Ray; the token is missing or wrong; Ray there is too
            old.
    """
    access.use_given_token()
    from ray.job_submission import JobSubmissionClient

    ray_private.reload_config()  # an embedded Ray of this process had a token of its own
    for name in ray_private.JOB_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)

    class Client(JobSubmissionClient):
        seconds = PROBE_S  # Ray's own waits without limit

        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            return super()._do_request(*arguments, **{"timeout": self.seconds, **options})

    # Ray prefers its variables to the address given.
    aside = {name: os.environ.pop(name) for name in _ADDRESSES if name in os.environ}
    try:
        with answering(url):
            client = Client(url)
        client.seconds = CALL_S
        return client
    finally:
        os.environ.update(aside)


@contextlib.contextmanager
def answering(url: str) -> Iterator[None]:
    """Turns what Ray's client raises into PlaceError."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        raise PlaceError(access.refused(url, error.message)) from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # Of Ray's client, which parses an answer.
        raise PlaceError(
            f"the server at {url} is not a Ray dashboard: its answer is wrong: "
            f"{_last_line(error)}; expected {_EXAMPLE}"
        ) from error
    except OSError as error:  # base class of requests' errors
        raise PlaceError(
            f"no Ray answers at {url}: {_last_line(error)}; expected {_EXAMPLE}. "
            "`ray start --head` starts it, from another machine it needs --dashboard-host"
        ) from error
    except RuntimeError as error:
        raise PlaceError(f"the Ray at {url} refuses: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    """Returns the reason in a server's refusal, the last line of a traceback."""
    lines = [line.strip(" .") for line in str(error).splitlines() if line.strip(" .")]
    return plain(lines[-1][:200]) if lines else type(error).__name__
