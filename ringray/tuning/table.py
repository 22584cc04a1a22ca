"""Tuned choices: the strategy and the blocks that were measured to be fastest, by problem.

``ringray tune`` writes them to ``$RINGRAY_HOME/tuned/local.json``; every other JSON file in that
folder is read too, so copying an exported table there installs it. An entry holds for one *bucket*
of shapes, and only on the hardware, with the measured code and with the versions of torch and
triton that it was measured with. Imports neither torch nor ray, and pydantic only where a table is
read or written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from ringray import partition, transport
from ringray.base import private_files, provenance
from ringray.base.errors import UserError, reason_of
from ringray.traffic.mask import Mask, power_of_two

Use = Literal["strategy", "kernel"]
DEFAULTS = {"partition": partition.DEFAULT, "transport": transport.DEFAULT, "backward": "planned"}
_LARGEST = 16 << 20  # bytes of one table
_LOCAL = "local.json"


@dataclass(frozen=True)
class Place:
    """The conditions under which an entry holds.

    ``hardware``: a GPU's name, or a CPU's with its cores; ``kernels``: digest of the measured code;
    ``device``: cpu or cuda.
    """

    hardware: str
    kernels: str
    torch: str | None
    triton: str | None
    device: str = "cuda"


@dataclass(frozen=True)
class Bucket:
    """Problems that share a choice. ``tokens``: of a batch entry, per ring for a strategy and per
    rank for a kernel, rounded up to a power of two, as ``batch`` is. ``mask``: full or causal,
    window, chunk, global tokens, prefix, documents. ``ring_size`` is 1 for a kernel, whose
    ``heads`` are those of one K/V head. ``threads``: of a rank on a CPU, else 0."""

    ring_size: int
    threads: int
    dtype: str
    tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    backward: bool


class Buckets(NamedTuple):
    """The two buckets of a problem: of the whole ring, and of one of its hops (``kernel``)."""

    strategy: Bucket
    kernel: Bucket


@dataclass(frozen=True)
class Entry:
    """One tuned choice.

    ``choice``: those of partition, transport, backward, backend, blocks and threads that were
    searched or fixed; ``metrics``: measured values; ``sweep``: digest of the search; ``when``: Unix
    time in seconds.
    """

    use: Use
    place: Place
    bucket: Bucket
    choice: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    sweep: str = ""
    when: float = 0.0

    @property
    def text(self) -> str:
        """Returns the choice in words."""
        words = {k: "+".join(v) if isinstance(v, list) else v for k, v in self.choice.items()}
        return " ".join(f"{name}={word}" for name, word in words.items() if word is not None)

    def __str__(self) -> str:
        return f"{self.text} (tuned by sweep {self.sweep[:8]})"


def buckets(
    mask: Mask,
    *,
    ring_size: int,
    threads: int,
    dtype: str,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    backward: bool,
) -> Buckets:
    """Returns the buckets of a problem; see ``Bucket``."""
    hop = -(-mask.seq_len // ring_size)
    ring = Bucket(
        ring_size=ring_size,
        threads=threads,
        dtype=dtype,
        tokens=power_of_two(mask.seq_len),
        batch=power_of_two(batch),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mask=mask.shape(mask.seq_len),
        backward=backward,
    )
    # A kernel sees one hop; its time grows with batch and K/V heads alike, so neither tells apart.
    kernel = replace(
        ring,
        ring_size=1,
        tokens=power_of_two(hop),
        batch=1,
        heads=heads // kv_heads,
        kv_heads=1,
        mask=mask.shape(hop),
    )
    return Buckets(ring, kernel)


def here(device: str = "cpu") -> Place:
    """Returns the place of this process. ``device``: a GPU's name, or cpu."""
    machine = provenance.hardware()
    versions = provenance.versions()
    kind = "cpu" if device == "cpu" else "cuda"
    name = f"{machine['cpu']}, {machine['cores']} cores" if kind == "cpu" else device
    kernels = provenance.measured_digest()
    return Place(name, kernels, versions["torch"], versions["triton"], kind)


class Table:
    """Entries of all places, found by use and bucket."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: list[Entry] = []
        self._by: dict[tuple[Use, Bucket], list[Entry]] = {}
        for entry in entries:
            self.put(entry)

    def put(self, entry: Entry) -> None:
        """Adds an entry; the younger of two with the same place and bucket stays."""
        rivals = self._by.setdefault((entry.use, entry.bucket), [])
        same = next((rival for rival in rivals if rival.place == entry.place), None)
        if same is not None:
            if same.when > entry.when:
                return
            rivals.remove(same)
            self.entries.remove(same)
        rivals.append(entry)
        self.entries.append(entry)

    def find(self, use: Use, wanted: Bucket, place: Place) -> tuple[Entry | None, str]:
        """Returns the entry that holds, or None, and its origin or the reason for None."""
        rivals = self._by.get((use, wanted), [])
        for entry in rivals:
            if entry.place == place:
                return entry, str(entry)
        if not rivals:
            return None, "nothing tuned for this shape"
        newest = max(rivals, key=lambda entry: entry.when)
        return None, f"tuned for other {_differing(newest.place, place)}; tune again"


def _differing(theirs: Place, ours: Place) -> str:
    parts = []
    for item in fields(Place):
        there, now = getattr(theirs, item.name), getattr(ours, item.name)
        if there != now:
            short = 12 if item.name == "kernels" else 60
            parts.append(f"{item.name} ({str(there)[:short]}, now {str(now)[:short]})")
    return " and ".join(parts)


def folder() -> Path:
    """Returns ``$RINGRAY_HOME/tuned``, which may not exist."""
    return private_files.home() / "tuned"


def table() -> Table:
    """Returns all entries in the files of ``folder()``. Reads them again when a file has changed.

    Raises:
        UserError: a file is not a table of this format.
    """
    files = sorted(folder().glob("*.json"))
    return _table(tuple((str(x), x.stat().st_mtime_ns, x.stat().st_size) for x in files))


@lru_cache(maxsize=4)
def _table(files: tuple[tuple[str, int, int], ...]) -> Table:
    return Table(entry for name, _, _ in files for entry in read(Path(name)))


def _check() -> ModuleType:
    try:
        from ringray.tuning import check
    except ModuleNotFoundError as error:
        raise UserError(
            f"{folder()}: tuned choices need {error.name}: pip install 'ringray[lab]', or set "
            "RINGRAY_TUNED=0 to use the defaults"
        ) from None
    return check


def read(path: Path) -> list[Entry]:
    """Returns the entries of one file.

    Raises:
        UserError: it cannot be read, or is not a table of this format.
    """
    check = _check()
    try:
        with private_files.regular(path) as file:
            raw = file.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise ValueError(f"larger than {_LARGEST >> 20} MiB")
        return [
            Entry(**entry | {"place": Place(**entry["place"]), "bucket": Bucket(**entry["bucket"])})
            for entry in check.entries(raw)
        ]
    except OSError as error:
        raise UserError(f"{path}: {reason_of(error)}") from None
    except ValueError as error:
        raise UserError(f"{path}: is not a table of tuned choices: {reason_of(error)}") from None


def text(entries: Iterable[Entry]) -> str:
    """Returns entries as a file; ValueError if one is wrong, so it could not be read again."""
    check = _check()
    data = {"format": check.FORMAT, "entries": [asdict(entry) for entry in entries]}
    written = json.dumps(data, indent=1) + "\n"
    check.entries(written)
    return written


def write(entries: Iterable[Entry], path: Path) -> None:
    """Replaces ``path``, whole or not at all.

    Raises:
        UserError: it cannot be written.
        ValueError: an entry is wrong.
    """
    written = text(entries)
    try:
        private_files.above(path)
        if path.parent == folder():
            private_files.close(path.parent)
        private_files.write(path, written)
    except OSError as error:
        raise UserError(f"{path}: {reason_of(error)}") from None


def add(entries: Iterable[Entry], path: Path | None = None) -> Path:
    """Puts entries into ``path`` (default: the local table) and returns the path.

    Raises:
        UserError: the present table cannot be read, or the new one not written.
    """
    path = path or folder() / _LOCAL
    try:
        with private_files.locked(path):
            merged = Table(read(path) if path.exists() else [])
            for entry in entries:
                merged.put(entry)
            write(merged.entries, path)
    except OSError as error:
        raise UserError(f"{path}: {reason_of(error)}") from None
    return path
