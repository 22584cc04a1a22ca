"""Why a Ray cluster does not let this process in, in words: its token, its versions, its port.

Ray itself tries for half a minute with a wrong token and then says that it cannot connect.
"""

from __future__ import annotations

import os
import re

from ringray.base.errors import PlaceError
from ringray.base.redaction import TOKENS

CALL_S = 5.0
WAY_IN = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the cluster's token or RAY_AUTH_TOKEN_PATH to "
    "a file that holds it (default ~/.ray/auth_token)"
)


def use_given_token() -> None:
    """Whoever gives a token means it to be used; before Ray is imported, which reads it once."""
    if "RAY_AUTH_MODE" not in os.environ and any(name in os.environ for name in TOKENS):
        os.environ["RAY_AUTH_MODE"] = "token"


def check(address: str) -> None:
    """One call to the GCS at ``address``, HOST:PORT.

    Raises:
        PlaceError: it refuses the token, or is none.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
    from ray.exceptions import AuthenticationError

    try:
        channel = init_grpc_channel(address)
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        stub.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=CALL_S)
    except AuthenticationError as error:
        raise PlaceError(no_token(address, error.message)) from None
    except grpc.RpcError as error:
        code, said = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNAUTHENTICATED:
            raise PlaceError(refused_token(address)) from None
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED):
            raise PlaceError(
                f"what answers at {address} is no Ray: {said[:200]}; expected HOST:PORT of a "
                "cluster's GCS, by default port 6379 (`ringray submit` takes a dashboard's URL)"
            ) from None
        # Whatever else it is, Ray will meet it and say so.


def refused_token(place: str) -> str:
    """What to say when a cluster refused the token that it was sent, or sent none."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode != "token":
        why = f"RAY_AUTH_MODE is {mode or 'not set'}"
        return f"the Ray at {place} wants a token, and {why}; {WAY_IN}"
    named = [name for name in TOKENS if name in os.environ] or ["~/.ray/auth_token"]
    return f"the Ray at {place} refuses the token, that of {named[0]}; it must be the cluster's own"


def no_token(place: str, message: str) -> str:
    """What to say when there is no token to send; ``message`` is Ray's."""
    return f"no token for the Ray at {place}: {message.split('. ')[0].rstrip('.')}; {WAY_IN}"


def reason(error: BaseException) -> str:
    """Why Ray did not let this process in, in a line if it is a mismatch of versions."""
    text = str(error)
    found = re.findall(r"^ +Ray: (\S+)\n +Python: (\S+)$", text, re.MULTILINE)
    if "Version mismatch" in text and len(found) == 2:
        there, here = (f"Ray {ray} on Python {python}" for ray, python in found)
        return (
            f"it runs {there}, this is {here}; use the same versions here, or let `ringray submit` "
            "send the sweep as a job, which runs with the cluster's"
        )
    return text
