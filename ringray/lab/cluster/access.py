"""Access to a Ray cluster: its token, and a first call that says why the cluster refuses.

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
    token, path = map(os.environ.get, TOKENS)
    try:
        if token is None:
            token = Path(path).read_text("utf-8") if path else ""
    except (OSError, ValueError) as error:
        raise PlaceError(f"{TOKENS[1]}: {path} cannot be read: {reason_of(error)}") from None
    if not re.fullmatch("[!-~]*", token.strip()):  # Ray ignores spaces around it
        names = " or ".join(TOKENS)
        raise PlaceError(f"{names}: a token of Ray has no character such as a space or line's end")


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
        raise PlaceError(refused(address, error.message)) from None
    except grpc.RpcError as error:
        status = getattr(error.code(), "name", "")
        why = (error.details() or status)[:200]
        if status == "UNAUTHENTICATED":
            raise PlaceError(refused(address, why)) from None
        if status in _NO_RAY:
            raise PlaceError(
                f"no Ray answers at {address}: {why}; expected HOST:PORT of a cluster's GCS, by "
                "default port 6379 (`ringray submit` takes a dashboard's URL)"
            ) from None


def refused(place: str, message: str) -> str:
    """Returns the message for a token that is missing or wrong; ``message`` is Ray's."""
    why = " ".join(message.split()).split(". ")[0].rstrip(".")
    return f"the Ray at {place} refuses the token, or gets none: {why}; {_HOW_TO}"
