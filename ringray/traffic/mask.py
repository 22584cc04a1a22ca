"""Masks: the keys that each query sees. Imports nothing but Python's own modules."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

Side = int | None  # positions, None for all of them
Window = int | tuple[Side, Side] | None
Boundaries = tuple[int, ...]
Documents = Boundaries | tuple[Boundaries, ...] | None
Lengths = int | tuple[int, ...] | None
Packed = TypeVar("Packed")  # how documents are given

MOST = 1 << 62  # numbers below it fit into 64 bits, sums of two included


@dataclass(frozen=True)
class MaskFields(Generic[Packed]):
    """The fields that tell masks apart, in global positions (tokens), unchecked.

    The fields are the arguments of ``ringray.ring_attention`` that mask. What all ranks agree on,
    the schema of the compiled operator, the names of tuned choices and the problem of a trial
    follow from them.
    """

    #: True length. Positions from there on are padding: they are not seen and see nothing.
    seq_len: int

    #: A query sees no later key.
    causal: bool = True

    #: A query at p sees ``[p - window, p]`` (causal only); or (left, right): it sees
    #: ``[p - left, p + right]``, None for all on that side.
    window: Window = None

    #: Packed documents: in a ``Mask`` boundaries ``(0, ..., seq_len)``, or one such tuple for each
    #: batch row. A query sees its own document only.
    documents: Packed = field(default=cast("Any", None), metadata={"argument": "cu_seqlens"})

    #: A query sees its own of the chunks of this length that begin with each document.
    chunk: int | None = None

    #: Of each document (one number for all, or one for each) the first positions see each other in
    #: both directions, whatever window and chunk say, and nothing else; only with ``causal``.
    prefix: Lengths = None

    #: Beside its window or chunk a query sees the first positions of its document, as far as
    #: ``causal`` lets it; without ``causal`` these see the whole document.
    global_tokens: int | None = None

    #: Beside what it sees else a query sees the first positions of the sequence, as far as
    #: ``causal`` lets it: one prompt with many packed answers.
    shared_prefix: int | None = None

    def most_areas(self, documents: int) -> int:
        """Returns the most rectangles that ``areas`` cuts a mask of so many documents into, beside
        its first one."""
        firsts = (self.prefix is not None) + 2 * (self.global_tokens is not None)
        chunks = self.seq_len // self.chunk if self.chunk else 0
        parts = documents + firsts * max(documents, 1) + chunks + (self.shared_prefix is not None)
        # Keys that are seen from afar are counted apart from the others.
        return parts if (self.global_tokens, self.shared_prefix) == (None, None) else 4 * parts


@dataclass(frozen=True)
class Mask(MaskFields[Documents]):
    """The keys that each query sees, in global positions (tokens). Masks that are written in
    different ways but see the same are equal.

    Raises:
        ValueError: no tokens, a window to the right or a one-sided one that ``causal`` contradicts,
            a prefix without ``causal``, global tokens or a shared prefix with another prefix or
            where every query sees them anyway, numbers below the least, or boundaries that decrease
            or do not go from 0 to ``seq_len``.
    """

    def __post_init__(self) -> None:
        if not 1 <= self.seq_len < MOST:
            raise ValueError(f"seq_len: got {self.seq_len}, expected at least 1 token")
        object.__setattr__(self, "window", normal_window(self.window, causal=self.causal))
        for name in ("chunk", "global_tokens", "shared_prefix"):
            size = getattr(self, name)
            if size is not None and not 1 <= size < MOST:
                raise ValueError(f"{name}: got {size}, expected None or an integer of at least 1")
        if self._by_row:
            if len(set(self.documents or ())) > 1:
                object.__setattr__(self, "prefix", self.rows[0].prefix)  # and checks all rows
                return
            object.__setattr__(self, "documents", self.documents and self.documents[0])
        if self.documents is not None:
            self._check_documents()
        if self.prefix is not None:
            object.__setattr__(self, "prefix", self._normal_prefix())
        self._check_far_keys("global_tokens", ("window", "chunk"))
        self._check_far_keys("shared_prefix", ("window", "chunk", "documents"))

    def _check_documents(self) -> None:
        bounds = self.boundaries
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != self.seq_len:
            raise ValueError(
                "cu_seqlens: expected boundaries from 0 to seq_len "
                f"({self.seq_len}), got {_brief(bounds)}"
            )
        if any(a > b for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"cu_seqlens: boundaries must not decrease, got {_brief(bounds)}")

    def _check_far_keys(self, name: str, limits: tuple[str, ...]) -> None:
        """Raises ValueError unless one of ``limits`` hides keys that ``name`` shows, alone."""
        tokens = getattr(self, name)
        if tokens is None:
            return
        if all(getattr(self, limit) is None for limit in limits):
            *first, last = (argument_of(limit) for limit in limits)
            raise ValueError(
                f"{name}: got {tokens} without {', '.join(first)} and {last}, expected one of "
                "them: else every query sees the first positions"
            )
        for other in ("prefix", "global_tokens"):
            if other != name and getattr(self, other) is not None:
                value = _brief(self.prefixes) if other == "prefix" else getattr(self, other)
                raise ValueError(
                    f"{name}: got {tokens} with {other} {value}, expected one or the other"
                )

    def _normal_prefix(self) -> tuple[int, ...] | None:
        """Returns the lengths as a tuple, None where no position is in a prefix."""
        lengths, documents = self.prefixes, len(self.boundaries) - 1
        if len(lengths) not in (1, documents) or any(not 0 <= x < MOST for x in lengths):
            raise ValueError(
                f"prefix: got {_brief(lengths)}, expected None or integers of at least 0, one for "
                f"all documents or one for each of {documents}"
            )
        if not self.causal:
            raise ValueError(
                f"prefix: got {_brief(lengths)} without causal, expected causal: positions after a "
                "prefix see no later one"
            )
        return lengths if any(lengths) else None

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Returns the lengths of prefixes: one for all documents, or one for each."""
        return self.prefix if isinstance(self.prefix, tuple) else (self.prefix or 0,)

    @cached_property
    def rows(self) -> tuple[Mask, ...]:
        """The mask of each batch row where they differ, else one for all."""
        if not self._by_row:
            return (self,)
        return tuple(replace(self, documents=row) for row in cast("Any", self.documents))

    @property
    def _by_row(self) -> bool:
        return bool(self.documents) and isinstance(cast("Any", self.documents)[0], tuple)

    @property
    def boundaries(self) -> Boundaries:
        """Returns the document boundaries; one document if nothing is packed. Not for a mask of
        several ``rows``."""
        if self.documents is None:
            return (0, self.seq_len)
        return cast("Boundaries", self.documents)

    @property
    def far_keys(self) -> tuple[Boundaries, int] | None:
        """Returns the positions from which on some keys are seen from any distance, and how many
        they are; None where there are none. Not for a mask of several ``rows``."""
        if self.shared_prefix is not None:
            return (0,), self.shared_prefix
        return None if self.global_tokens is None else (self.boundaries, self.global_tokens)

    @property
    def plain(self) -> bool:
        """Tells whether the mask is causal or none at all."""
        return all(getattr(self, name) is None for name in LIMITS)

    def shape(self, tokens: int) -> str:
        """Returns the kind of a mask and its sizes, rounded up to a power of two, of a sequence of
        ``tokens``: problems with the same one share tuned choices."""
        text = "causal" if self.causal else "full"
        sides = self.window if isinstance(self.window, tuple) else (self.window,)
        near = [None if x is None or x >= tokens - 1 else power_of_two(x + 1) for x in sides]
        if any(near):
            text = f"window {':'.join(str(x or '') for x in near)}"
        if self.chunk is not None and self.chunk < tokens:
            text += f", chunk {power_of_two(self.chunk)}"
        if self.global_tokens is not None and text not in ("causal", "full"):
            text += f", global {power_of_two(min(self.global_tokens, tokens))}"
        if self.shared_prefix is not None:
            text += f", shared {power_of_two(min(self.shared_prefix, tokens))}"
        if any(self.prefixes):
            text += f", prefix {power_of_two(min(max(self.prefixes), tokens))}"
        return text if self.documents is None else f"{text}, documents"


# The fields that take keys away from a mask that is causal or full; None where they do not.
LIMITS = tuple(item.name for item in fields(Mask) if item.name not in ("seq_len", "causal"))


def argument_of(name: str) -> str:
    """Returns the argument of the op that a field of ``Mask`` has its value from."""
    return str(Mask.__dataclass_fields__[name].metadata.get("argument", name))


def power_of_two(n: int) -> int:
    """Returns the least power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def normal_window(window: Window, *, causal: bool) -> Window:
    """Returns one form of windows that see the same: a number if ``causal``, else both sides.

    Raises:
        ValueError: negative numbers, or a window that ``causal`` contradicts.
    """
    left, right = window if isinstance(window, tuple) else (window, None)
    if any(side is not None and not 0 <= side < MOST for side in (left, right)):
        expected = "two integers" if isinstance(window, tuple) else "None or an integer"
        raise ValueError(f"window: got {window}, expected {expected} of at least 0")
    if causal and right:
        raise ValueError(
            f"window: got {window} with causal, expected 0 or None on the right side: a causal "
            "query sees no later key"
        )
    if isinstance(window, int) and not causal:
        raise ValueError(
            f"window: got {window} without causal, expected causal, or both sides, left and right: "
            "one number looks back from its query"
        )
    if causal:
        return left
    return None if left is None and right is None else (left, right)


def _brief(values: tuple[int, ...]) -> str:
    """Writes one number as it is, and some of many."""
    if len(values) == 1:
        return str(values[0])
    return str(values) if len(values) <= 8 else f"{values[:4]} ... {values[-2:]}"


def uneven_boundaries(seq_len: int, count: int) -> tuple[int, ...]:
    """Returns boundaries of ``count`` packed documents of fixed, uneven lengths.

    Lengths repeat 1 : 2 : 3 (so neighbours differ and few divide a ring evenly), scaled to
    ``seq_len`` tokens; more documents than tokens leave some empty.
    """
    weights = [1 + i % 3 for i in range(count)]
    total, running, bounds = sum(weights), 0, [0]
    for weight in weights:
        running += weight
        bounds.append(seq_len * running // total)
    return tuple(bounds)
