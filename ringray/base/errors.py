"""Errors for users: something outside of ringray's own code is wrong.

Every message is complete on its own: the given value, the expected one, the way out. The command
line prints it without a traceback and exits with ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Literal

_SHOWN = 20  # mistakes of one file in one message


class RingrayError(Exception):
    """Base of all errors for users."""

    exit_code = 1


class UserError(RingrayError):
    """The command line, a name or a file is wrong."""

    exit_code = 2


class PlaceError(UserError):
    """A store, a tracking server or a cluster cannot be used."""


class ClusterError(PlaceError):
    """A local Ray did not start, or a Ray has ended; the same command may succeed later."""

    exit_code = 3


class ForeignFileError(PlaceError):
    """Another user may have written a file."""


class DamagedStore(PlaceError):
    """The store cannot be read, or only in part."""


class SpecError(UserError):
    """A spec is wrong. ``str()`` is ``FILE:LINE: FIELD: message``, one line per mistake.

    Attributes:
        path: the file, as the user named it.
        line: 1-based; None if the mistake is not in one place.
        field: dotted, as in ``problem.heads``; None if the mistake is about the whole file.
        message: the given value and the expected one.
        errors: all mistakes of the file in the order of lines. The attributes above belong to the
            first.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str,
        line: int | None = None,
        field: str | None = None,
        others: Sequence[SpecError] = (),
    ) -> None:
        self.path = path
        self.line = line
        self.field = field
        self.message = message
        self.errors: tuple[SpecError, ...] = (self, *others)
        place = path if line is None else f"{path}:{line}"
        own = f"{place}: {field}: {message}" if field else f"{place}: {message}"
        lines = [own, *map(str, others[: _SHOWN - 1])]
        if len(others) >= _SHOWN:
            lines.append(f"{path}: and {len(others) - _SHOWN + 1} more")
        super().__init__("\n".join(lines))

    @classmethod
    def together(cls, errors: Iterable[SpecError]) -> SpecError:
        """Returns one error that reports all ``errors`` (at least one) of a file, by line."""
        first, *others = sorted(errors, key=lambda error: error.line or 0)
        return cls(
            first.message, path=first.path, line=first.line, field=first.field, others=others
        )


class PeerError(RuntimeError):
    """A failure of another rank, which has the reason. ``kind``: the kind of its fault."""

    def __init__(self, message: str, kind: Literal["out-of-memory", "user-error"]) -> None:
        super().__init__(message)
        self.kind = kind


def settle(error: BaseException) -> None:
    """Marks an error of which other ranks need no word: they know it, or wait for a message."""
    vars(error)["settled"] = True


def settled(error: BaseException | None) -> bool:
    """Tells whether ``settle`` has marked an error, or one that it was raised from."""
    return error is not None and ("settled" in vars(error) or settled(error.__cause__))


class StoppedError(RingrayError):
    """The end of a wait because the run stops."""


def reason_of(error: BaseException) -> str:
    """Returns the reason in an error for the middle of a sentence, which is never empty: the words
    of an operating system, the text, or the type of an error that has none."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).strip() or type(error).__name__


def unknown(what: str, got: object, choices: Iterable[str]) -> str:
    """Returns the message about a name that is not in ``choices``: given, expected, nearest."""
    choices = tuple(choices)
    hint = suggestion(str(got), choices)
    return f"{what}: got {got!r}, expected one of {', '.join(choices)}" + (hint and f"; {hint}")


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Returns ``did you mean 'zigzag'?`` with the choice nearest to ``name``, or ""."""
    close = nearest(name, choices)
    return f"did you mean {close!r}?" if close else ""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that ``name`` was probably meant to be, or None."""
    by_folded = {choice.casefold(): choice for choice in choices}
    close = get_close_matches(name[:100].casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None
