"""Documents in files, packed into sequences; each rank reads only its own rows.

A *text* file is one document of UTF-8 bytes, each byte a token, unless a tokenizer is given. A
*token* file is a ``.npy`` array of integers, one document, or several if ``NAME.ends.npy`` beside
it has the index behind the last token of each. Files are mapped into memory, not read.

The documents of an epoch follow each other in an order drawn from the seed; a sequence is the next
``seq_len`` tokens of them. Documents that do not end there go on in the next sequence.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringray.base.errors import reason_of
from ringray.partition import Partitioning

BYTES = 256  # tokens of text without a tokenizer
NO_LABEL = -100
_SUFFIXES = (".txt", ".md", ".jsonl", ".npy")  # that are taken from folders
_CONTROL = frozenset(range(32)) - {8, 9, 10, 12, 13, 27}  # bytes that text does not have
_LOOKED_AT = 1 << 16  # bytes of a file that are checked

Ints = NDArray[np.int64]


class CorpusError(ValueError):
    """A corpus that cannot be used; the message names the file."""


@dataclass(frozen=True)
class SequenceRows:
    """SequenceRows of one sequence: tokens, and labels, the next token of the same document, else
    ``NO_LABEL``. ``ends``: boundaries of the documents in the whole sequence, 0 first.
    ``partition``: that dealt the sequence; None: the model's."""

    tokens: Ints
    labels: Ints
    ends: Ints
    partition: Partitioning | None = None


class Corpus:
    """The documents of some files.

    Args:
        paths: files, or folders, of which all ``.txt``, ``.md``, ``.jsonl`` and ``.npy`` files.
        tokenizer: folder of a Hugging Face tokenizer; text is then tokenized once and kept in
            ``kept``.
        seed: of the order of documents.

    Raises:
        CorpusError: nothing there, an empty or a binary file, arrays of another kind.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        tokenizer: str | Path | None = None,
        kept: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        files = list(_files(paths))
        if not files:
            raise CorpusError(f"corpus: no .txt, .md, .jsonl or .npy file in {_listed(paths)}")
        self.vocabulary = BYTES
        self.seed = seed
        if tokenizer is not None:
            files, self.vocabulary = _tokenized(files, Path(tokenizer), kept)
        self._files = [_mapped(file) for file in files]
        pieces = [
            (number, begin, end)
            for number, file in enumerate(files)
            for begin, end in _documents(file, len(self._files[number]))
        ]
        self._pieces = np.array(pieces, np.int64).reshape(-1, 3)
        self.tokens = int((self._pieces[:, 2] - self._pieces[:, 1]).sum())
        if self.tokens < 2:
            raise CorpusError(f"corpus: {_listed(paths)} holds {self.tokens} tokens, expected more")
        largest = max(int(file[:_LOOKED_AT].max(initial=0)) for file in self._files)
        self.vocabulary = max(self.vocabulary, largest + 1)

    def rows(self, number: int, seq_len: int, positions: Ints) -> SequenceRows:
        """Returns rows of sequence ``number`` (from 0) of ``seq_len`` tokens, at ``positions`` in
        it; those from ``seq_len`` on are padding."""
        first = number * seq_len
        inside = positions < seq_len
        places = first + np.minimum(positions, seq_len - 1)
        tokens = np.where(inside, self._tokens(places), 0)
        ends = self.ends(number, seq_len)
        following = places + 1
        begins = np.isin(following, self._all_ends(first, first + seq_len))
        labels = np.full_like(tokens, NO_LABEL)
        labelled = inside & ~begins
        labels[labelled] = self._tokens(following[labelled])
        return SequenceRows(tokens, labels, ends)

    def _tokens(self, places: Ints) -> Ints:
        """Returns the tokens at some places of the endless order of documents."""
        tokens = np.empty(places.shape, np.int64)
        for epoch in np.unique(places // self.tokens):
            here = places // self.tokens == epoch
            order, begins = self._order(int(epoch))
            place = places[here] - epoch * self.tokens
            which = np.searchsorted(begins, place, side="right") - 1
            number, begin, _ = self._pieces[order[which]].T
            inside = begin + place - begins[which]
            values = np.empty(len(place), np.int64)
            for file in np.unique(number):
                some = number == file
                values[some] = self._files[file][inside[some]]
            tokens[here] = values
        return tokens

    def ends(self, number: int, seq_len: int, pool: int = 1) -> Ints:
        """Returns the boundaries of documents in ``pool`` sequences together, 0 first."""
        first, last = number * seq_len, (number + pool) * seq_len
        inner = self._all_ends(first, last)
        inner = inner[(inner > first) & (inner < last)] - first
        return np.concatenate([[0], inner, [last - first]]).astype(np.int64)

    def _all_ends(self, first: int, last: int) -> Ints:
        """Returns where documents end in [first, last], the ends of epochs included."""
        every_end = []
        for epoch in range(first // self.tokens, last // self.tokens + 1):
            _, begins = self._order(epoch)
            ends = np.append(begins[1:], self.tokens) + epoch * self.tokens
            low, high = np.searchsorted(ends, [first, last + 1])
            every_end.append(ends[low:high])
        return np.concatenate(every_end)

    @lru_cache(maxsize=4)  # noqa: B019  # a corpus lives as long as its training
    def _order(self, epoch: int) -> tuple[Ints, Ints]:
        """Returns the documents of an epoch in their order, and where each begins in it."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._pieces))
        sizes = (self._pieces[:, 2] - self._pieces[:, 1])[order]
        return order, np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)


class RandomTokens:
    """Endless documents of uniform random tokens, for measurements; each sequence is one."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self.vocabulary, self.seed = vocabulary, seed

    def rows(self, number: int, seq_len: int, positions: Ints) -> SequenceRows:
        """Returns rows of a sequence, as ``Corpus.rows``."""
        drawn = np.random.default_rng([self.seed, number])
        whole = drawn.integers(self.vocabulary, size=seq_len + 1, dtype=np.int64)
        return one_document(whole[:-1], whole[1:], positions)


def one_document(tokens: Ints, labels: Ints, positions: Ints) -> SequenceRows:
    """Returns the rows at ``positions`` of a sequence that is one document."""
    places = np.minimum(positions, len(tokens) - 1)
    inside = positions < len(tokens)
    ends = np.array([0, len(tokens)])
    return SequenceRows(tokens[places], np.where(inside, labels[places], NO_LABEL), ends)


def _files(paths: Sequence[str | Path]) -> Iterable[Path]:
    for path in (Path(path).expanduser() for path in paths):
        if path.is_dir():
            some = (file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
            yield from sorted(file for file in some if not file.name.endswith(".ends.npy"))
        elif path.is_file():
            yield path
        else:
            raise CorpusError(f"corpus: {path} is neither a file nor a folder")


def _listed(paths: Sequence[str | Path]) -> str:
    return ", ".join(map(str, paths)) or "no path"


def _mapped(file: Path) -> NDArray[Any]:
    """Returns the tokens of a file, mapped into memory."""
    if file.stat().st_size == 0:
        raise CorpusError(f"corpus: {file} is empty")
    if file.suffix != ".npy":
        try:
            text = np.memmap(file, np.uint8, "r")
        except OSError as error:
            raise CorpusError(f"corpus: {file}: {reason_of(error)}") from None
        if _CONTROL & set(text[:_LOOKED_AT].tolist()):
            raise CorpusError(f"corpus: {file} is binary, expected text or a .npy array of tokens")
        return text
    try:
        array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise CorpusError(f"corpus: {file} is no .npy array: {reason_of(error)}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise CorpusError(
            f"corpus: {file} has {array.dtype} of shape {array.shape}, expected integers (tokens,)"
        )
    return array


def _documents(file: Path, tokens: int) -> list[tuple[int, int]]:
    """Returns begin and end of each document of a file."""
    beside = file.with_suffix(".ends.npy")
    if file.suffix != ".npy" or not beside.exists():
        return [(0, tokens)]
    ends = _mapped(beside).astype(np.int64)
    if (np.diff(ends) <= 0).any() or ends[0] <= 0 or ends[-1] != tokens:
        raise CorpusError(
            f"corpus: {beside} has no ascending ends of documents up to the {tokens} tokens"
        )
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))


def _tokenized(
    files: Sequence[Path], folder: Path, kept: str | Path | None
) -> tuple[list[Path], int]:
    """Returns token files of text files, made once, and the size of the vocabulary."""
    if not folder.is_dir():
        raise CorpusError(f"tokenizer: {folder} is no folder of a Hugging Face tokenizer")
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CorpusError(f"tokenizer: {folder} holds none: {str(error)[:200]}") from None
    parts = sorted((part.name, part.stat().st_mtime_ns) for part in folder.glob("*.*"))
    place = Path(kept) if kept is not None else folder / "tokens"
    place.mkdir(parents=True, exist_ok=True)
    token_files = []
    for file in files:
        if file.suffix == ".npy":
            token_files.append(file)
            continue
        _mapped(file)  # is text
        identity = f"{file.resolve()} {file.stat().st_mtime_ns} {folder.resolve()} {parts}"
        made = place / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.npy"
        if not made.exists():
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise CorpusError(f"corpus: {file} is no UTF-8: {error.reason}") from None
            ids = tokenizer(text, return_attention_mask=False)
            aside = made.with_suffix(f".{os.getpid()}.tmp.npy")
            np.save(aside, np.array(ids["input_ids"], np.uint32))
            aside.replace(made)
        token_files.append(made)
    return token_files, len(tokenizer)
