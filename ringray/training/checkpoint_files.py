"""The files of one checkpoint: written with their digests, read without running what they hold.

Metadata are unpickled by the classes that they consist of, and no other name; tensors and numbers
are loaded with ``weights_only``.

The manifest has size and digest of every file; checkpoints without one are of an earlier ringray.
A folder loses the suffix of a part when all is written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem, planner
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ringray.base import private_files
from ringray.base.errors import reason_of

METADATA, FACTS, MANIFEST, PART = ".metadata", "facts.json", "manifest.json", ".part"
# Parts of torch's metadata, beside dtypes; each does no more than to hold its arguments.
_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    *((_METADATA, name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip

Facts = dict[str, Any]


class _Written(list[WriteResult]):
    """The results of a rank, and its part of the manifest."""

    files: dict[str, tuple[int, str]]


class Writer(filesystem.FileSystemWriter):
    """Writes a checkpoint into a folder with the suffix of a part, and takes that off."""

    def write_data(
        self, plan: planner.SavePlan, planner: planner.SavePlanner
    ) -> Future[list[WriteResult]]:
        """Writes the files of this rank."""
        results = _Written(super().write_data(plan, planner).wait())
        names = {written.storage_data.relative_path for written in results}
        results.files = {name: _digest(Path(self.path) / name) for name in names}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: stored.Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the checkpoint, on one rank."""
        super().finish(metadata, results)
        place = Path(self.path)
        files = {name: _digest(place / name) for name in (FACTS, METADATA)}
        for written in results:
            files |= cast("_Written", written).files
        with (place / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(files, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(place.with_suffix(""), ignore_errors=True)  # one that was damaged
        place.rename(place.with_suffix(""))


class Reader(filesystem.FileSystemReader):
    """Reads a checkpoint that its files show to be whole.

    ``share``, ``shares``: the part of the digests that this rank compares. ``accept``: gets the
    facts before anything is loaded, and may raise. What one rank raises all get.
    """

    def __init__(
        self, place: Path, share: int, shares: int, accept: Callable[[Facts], object]
    ) -> None:
        super().__init__(place)
        self._place, self._share, self._shares, self._accept = place, share, shares, accept
        self.facts: Facts = {}

    def read_metadata(self, *_: Any, **__: Any) -> stored.Metadata:
        """Returns metadata that are filled later: other ranks do not get what this raises."""
        return stored.Metadata({})

    def set_up_storage_reader(self, metadata: stored.Metadata, *args: Any, **options: Any) -> None:
        """Checks all files, and reads the metadata."""
        sizes = self._check()
        self.facts = _json(self._place / FACTS)
        if self._place.name != f"step-{str(self.facts.get('step')).zfill(8)}":
            raise ValueError(f"{FACTS} is not of this step")
        self._accept(self.facts)
        try:
            with private_files.regular(self._place / METADATA) as file:
                read = _Unpickler(file).load()
            metadata.state_dict_metadata.update(read.state_dict_metadata)
            metadata.storage_data = read.storage_data
            outside = {part.relative_path for part in read.storage_data.values()} - {*sizes}
        except Exception as error:  # of any type, where a file is damaged
            raise ValueError(f"{METADATA}: {reason_of(error)}") from None
        if outside:
            raise ValueError(f"{METADATA}: names {min(outside)}, which is not of this checkpoint")
        super().set_up_storage_reader(metadata, *args, **options)

    def _check(self) -> dict[str, int]:
        """Returns the sizes of the checkpoint's files."""
        sizes = {path.name: path.lstat().st_size for path in self._place.iterdir()}
        if MANIFEST not in sizes:
            return sizes
        manifest = _json(self._place / MANIFEST)
        # In the same order on all ranks, each of which reads its share of the files, and the facts,
        # which ``accept`` would refuse for good if a bit of them was wrong.
        for number, name in enumerate(sorted({FACTS, METADATA, *manifest})):
            if name not in sizes or name not in manifest:
                raise ValueError(f"{name[:80]} is missing")
            try:
                size, digest = manifest[name]
            except (TypeError, ValueError):
                raise ValueError(f"{MANIFEST} does not tell size and digest of {name}") from None
            if sizes[name] != size:
                raise ValueError(f"{name} has {sizes[name]:,} bytes, expected {size:,}")
            mine = name == FACTS or number % self._shares == self._share
            if mine and _digest(self._place / name) != (size, digest):
                raise ValueError(f"{name} has other bytes than were written")
        return {name: sizes[name] for name in manifest}


class _Unpickler(pickle.Unpickler):
    """Unpickles metadata, without a look at names of anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class of metadata."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}"[:80])
        return super().find_class(module, name)


class Planner(DefaultLoadPlanner):
    """Puts numbers in the place of numbers; torch's own would unpickle anything."""

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        """Loads what is no tensor."""
        loaded = torch.load(value, weights_only=True)
        # Saved again, for torch's own planner unpickles whatever it gets.
        torch.save(loaded, safe := io.BytesIO())
        safe.seek(0)
        super().load_bytes(read_item, safe)


def _digest(path: Path) -> tuple[int, str]:
    with private_files.regular(path) as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()
        return file.tell(), digest


def _json(path: Path) -> Facts:
    try:
        with private_files.regular(path) as file:
            return dict(json.loads(file.read()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path.name}: {reason_of(error)}") from None
