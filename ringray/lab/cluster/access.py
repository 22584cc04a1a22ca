"""Access to a Ray cluster: explains why it refuses a connection: token, versions or port.

Ray itself tries for half a minute with a wrong token and then says that it cannot connect.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ringray.base.errors import PlaceError, reason_of
from ringray.base.redaction import TOKENS
from ringray.lab.cluster import ray_private

CALL_S = 15.0  # seconds for the call
_HOW_TO = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the cluster's token or RAY_AUTH_TOKEN_PATH to "
    "a file that holds it (default ~/.ray/auth_token)"
)
# Statuses of gRPC of what is no Ray; Ray meets any other error again and reports it.
_NO_RAY = ("UNAVAILABLE", "UNIMPLEMENTED", "DEADLINE_EXCEEDED")


def use_given_token() -> None:
    """Turns token authentication on if a token is given. Call it before importing Ray, which reads
    the mode once.

    Raises:
        PlaceError: the token cannot be used, and Ray itself would end the process.
    """
    if "RAY_AUTH_MODE" not in os.environ and any(name in os.environ for name in TOKENS):
        os.environ["RAY_AUTH_MODE"] = "token"
    check_token()


def check_token() -> None:
    """Raises PlaceError if Ray's token cannot be read or cannot stand in a header."""
    value, path = map(os.environ.get, TOKENS)
    try:
        token = Path(path).read_text("utf-8") if value is None and path else value or ""
    except (OSError, ValueError) as error:
        raise PlaceError(
            f"{TOKENS[1]}: the file {path} cannot be read: {reason_of(error)}"
        ) from None
    if not re.fullmatch("[!-~]*", token.strip()):  # Ray ignores spaces around it
        name = TOKENS[0] if value is not None else TOKENS[1]
        raise PlaceError(f"{name}: a token of Ray has no character such as a space or a line's end")


def check(address: str) -> None:
    """Checks with one call that the GCS at ``address``, HOST:PORT, lets this process in.

    Raises:
        PlaceError: it refuses the token, or is not a GCS.
    """
    import grpc
    from ray.exceptions import AuthenticationError

    try:
        ray_private.check_alive(address, CALL_S)
    except AuthenticationError as error:
        raise PlaceError(no_token(address, error.message)) from None
    except grpc.RpcError as error:
        status = getattr(error.code(), "name", "")
        if status == "UNAUTHENTICATED":
            raise PlaceError(refused_token(address)) from None
        if status in _NO_RAY:
            raise PlaceError(
                f"no Ray answers at {address}: {(error.details() or status)[:200]}; expected "
                "HOST:PORT of a cluster's GCS, by default port 6379 (`ringray submit` takes a "
                "dashboard's URL)"
            ) from None


def refused_token(place: str) -> str:
    """Returns the message for a cluster that refused the token, or got none."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode != "token":
        why = f"RAY_AUTH_MODE is {mode or 'not set'}"
        return f"the Ray at {place} wants a token, and {why}; {_HOW_TO}"
    named = [name for name in TOKENS if name in os.environ] or ["~/.ray/auth_token"]
    return f"the Ray at {place} refuses the token, that of {named[0]}; it must be the cluster's own"


def no_token(place: str, message: str) -> str:
    """Returns the message for a missing token; ``message`` is Ray's."""
    return f"no token for the Ray at {place}: {message.split('. ')[0].rstrip('.')}; {_HOW_TO}"


def reason(error: BaseException) -> str:
    """Explains why Ray refused this process, in one line for a mismatch of versions."""
    text = str(error).strip() or type(error).__name__
    versions = re.findall(r"^ +Ray: (\S+)\n +Python: (\S+)$", text, re.MULTILINE)
    if "Version mismatch" in text and len(versions) == 2:
        there, here = (f"Ray {ray} on Python {python}" for ray, python in versions)
        return (
            f"it runs {there}, this is {here}; use the same versions here, or let `ringray submit` "
            "send the sweep as a job, which runs with the cluster's"
        )
    return text
