"""Job servers: their address, wrong addresses, and the reasons of refusals."""

from __future__ import annotations

import pytest

from ringray.base.errors import PlaceError, UserError
from ringray.lab.cluster import job_server
from tests.support.bad_servers import bad_server

URL = "http://head:8265"


@pytest.mark.parametrize(
    "given",
    ["head:6379", "head", "ray://head:10001", "http://", "http://h:x", "http://a b", "auto"],
)
def test_not_the_url_of_a_job_server(given: str) -> None:
    with pytest.raises(UserError, match=r"expected|which is http://HOST:8265"):
        job_server.address(given)


def test_the_address_is_what_was_given_else_what_ray_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(UserError, match="no cluster to submit to; give --address http://HOST"):
        job_server.address(None)
    monkeypatch.setenv("RAY_ADDRESS", "http://a:1")
    assert job_server.address(None) == "http://a:1"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://b/")
    assert job_server.address(None) == "https://b"
    assert job_server.address("http://c:2") == "http://c:2"


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"<html>", "is not a Ray dashboard"),
        (b'{"version": "4"}', "is not a Ray dashboard: its answer is wrong: 'ray_version'"),
        (b'{"ray_version": "1.8.0"}', "Ray version 1.8.0 is running on the cluster"),
    ],
)
def test_what_is_no_job_server(answer: bytes, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # which a token of another test has set
    with (
        bad_server("silent", {"/api/version": answer}) as port,
        pytest.raises(PlaceError, match=match),
    ):
        job_server.connect(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token(status: int) -> None:
    from ray._private.authentication.http_token_authentication import (
        format_authentication_http_error,
    )
    from ray.exceptions import AuthenticationError

    text = format_authentication_http_error(status, "Unauthorized")
    assert text is not None
    match = f"{URL} refuses the token, or gets none: .* set RAY_AUTH_MODE=token"
    with pytest.raises(PlaceError, match=match), job_server.answering(URL):
        raise AuthenticationError(text)
