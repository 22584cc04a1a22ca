"""Amounts in words."""

from __future__ import annotations

import pytest

from ringray.base import units


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "–"), (float("nan"), "–"), (0.0, "0.00"), (0.0123, "0.0123"), (1e-9, "0.000000"),
        (0.95, "0.950"),
        (1.234, "1.23"), (12.345, "12.3"), (99.96, "100.0"), (123.4, "123"), (12345.6, "12,346"),
    ],
)  # fmt: skip
def test_three_digits(number: float | None, text: str) -> None:
    assert units.digits(number) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 30, "3.00 GiB"),
        (1 << 50, "1,024 TiB"),
    ],
)
def test_memory(count: int, text: str) -> None:
    assert units.memory(count) == text
