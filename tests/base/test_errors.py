"""Messages have a reason, whatever error it comes from."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from ringray.base import errors
from ringray.base.errors import reason_of
from tests.test_architecture import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


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


# Classes of errors whose messages are ringray's own: none is empty.
OWN = {name for name, value in vars(errors).items() if isinstance(value, type)}
OWN |= {"Mismatch", "Damage", "CorpusError"}


def handlers() -> Iterator[tuple[str, ast.ExceptHandler, str]]:
    for path in sorted(ROOT.glob("ringray/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.name and node.type:
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                if {ast.unparse(kind).rpartition(".")[2] for kind in kinds} - OWN:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node, node.name


def bare(handler: ast.ExceptHandler, name: str) -> Iterator[str]:
    """Yields what puts the text of a caught error, which may be empty, into a message."""
    typed = f"{{type({name}).__name__}}: "
    for node in ast.walk(handler):
        if isinstance(node, ast.JoinedStr):
            for value in node.values:
                shown = ast.unparse(value) if isinstance(value, ast.FormattedValue) else ""
                text = ast.unparse(node)
                if shown.strip("f'\"") in (f"{{{name}}}", f"{{{name}.strerror}}"):
                    yield from [text] if typed not in text else []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from (ast.unparse(a) for a in node.exc.args if ast.unparse(a) == f"str({name})")


def test_errors_of_others_are_put_into_messages_by_their_reason() -> None:
    """No other way: an f-string of an error without a text ends in a colon."""
    sites = list(handlers())
    assert len(sites) > 50
    assert not [(place, text) for place, node, name in sites for text in bare(node, name)]
