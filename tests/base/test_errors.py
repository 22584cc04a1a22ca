"""Messages have a reason, whatever error it comes from."""

from __future__ import annotations

import pytest

from ringray.base.errors import reason_of


class Silent(Exception):
    def __str__(self) -> str:
        return " \n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device", "/x"), "no space left on device"),
        (OSError("no such pipe"), "no such pipe"),
        (TimeoutError(), "TimeoutError"),
        (ConnectionResetError(""), "ConnectionResetError"),
        (ValueError("no number"), "no number"),
        (ValueError(), "ValueError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Silent("x"), "Silent"),
    ],
)
def test_a_reason_is_never_empty(error: BaseException, reason: str) -> None:
    assert reason_of(error) == reason
