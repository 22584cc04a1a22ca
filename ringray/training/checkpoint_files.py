"""The files of one checkpoint: written with their digests, read without running what they hold.

The manifest has size and digest of every file; checkpoints without one are of an earlier ringray.
A folder loses the suffix of a part when all is written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, planner
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ringray.base import private_files
from ringray.base.errors import reason_of
from ringray.training import pickled
from ringray.training.pickled import Instance

METADATA, FACTS, MANIFEST, PART = ".metadata", "facts.json", "manifest.json", ".part"
_LARGEST = 1 << 28  # bytes of a file without tensors

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
        for path in (place, *place.iterdir()):  # under any umask
            private_files.close(path, private_files.WRITING)
        shutil.rmtree(place.with_suffix(""), ignore_errors=True)  # one that was damaged
        place.rename(place.with_suffix(""))


class Reader(filesystem.FileSystemReader):
    """Reads a checkpoint that its files show to be whole, and none but this user or root has made.

    ``share``, ``shares``: the part of the digests that this rank compares. ``accept``: gets the
    facts before anything is loaded, and may raise. What one rank raises all get: ForeignFileError
    if others may have written a file, else the checkpoint is damaged.
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
            state = pickled.read(_content(self._place / METADATA)).state
            for name, entry in state["state_dict_metadata"].items():
                metadata.state_dict_metadata[name] = _entry(entry)
            parts = state["storage_data"].items()
            metadata.storage_data = dict(_part(index, part, sizes) for index, part in parts)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{METADATA}: {reason_of(error)}") from None
        super().set_up_storage_reader(metadata, *args, **options)

    def _check(self) -> dict[str, int]:
        """Returns the sizes of the checkpoint's files."""
        there = [*self._place.iterdir()]
        for path in (self._place, *there):
            private_files.refuse_foreign(path)
        sizes = {path.name: path.lstat().st_size for path in there}
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

    def read_data(self, plan: planner.LoadPlan, planner: planner.LoadPlanner) -> Future[None]:
        """Reads what this rank needs, after a look at how each part is packed."""
        for item in plan.items:
            part = self.storage_data[item.storage_index]
            with private_files.regular(self._place / part.relative_path) as file:
                file.seek(part.offset)
                _refuse_unsafe(part.relative_path, file.read(part.length))
        return super().read_data(plan, planner)


class Planner(DefaultLoadPlanner):
    """Puts numbers in the place of numbers; torch's own would unpickle anything."""

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        """Loads what is no tensor."""
        loaded = torch.load(value, weights_only=True)
        present = self.state_dict[read_item.dest_index.fqn]
        # Of the same kind as what it replaces: a text in the place of a number fails steps later.
        for kind in (Tensor, tuple | list, int | float | None, type(present)):
            if isinstance(loaded, kind) != isinstance(present, kind):
                raise ValueError(f"{read_item.dest_index.fqn} is a {type(loaded).__name__}")
            if isinstance(present, kind):
                break
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
        return dict(json.loads(_content(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path.name}: {reason_of(error)}") from None


def _content(path: Path) -> bytes:
    with private_files.regular(path) as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"{path.name} has more than {_LARGEST:,} bytes")
    return content


def _entry(entry: Instance) -> stored.TensorStorageMetadata | stored.BytesStorageMetadata:
    if entry.name.endswith(".BytesStorageMetadata"):
        return stored.BytesStorageMetadata()
    chunks = [
        stored.ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
        for chunk in entry.state["chunks"]
    ]
    size = _size(entry.state["size"])
    return stored.TensorStorageMetadata(stored.TensorProperties(), size, chunks)


def _size(size: Instance) -> torch.Size:
    return torch.Size(size.arguments[0])


def _part(
    index: Instance, part: Instance, sizes: dict[str, int]
) -> tuple[stored.MetadataIndex, filesystem._StorageInfo]:
    """Returns where a tensor's part lies, within a file of the checkpoint."""
    name, offset = index.state["fqn"], index.state.get("offset")
    file, start, length = (part.state[x] for x in ("relative_path", "offset", "length"))
    if not (isinstance(name, str) and isinstance(file, str) and file in sizes):
        raise ValueError("it names a file that is not of this checkpoint")
    if not 0 <= start <= start + length <= sizes[file]:
        raise ValueError(f"{file} ends before {name}")
    place = stored.MetadataIndex(name, offset and _size(offset))
    return place, filesystem._StorageInfo(file, start, length)


def _refuse_unsafe(name: str, data: bytes) -> None:
    """Raises ValueError if ``torch.load`` might do more with data of a file than read as many
    bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as parts:
            if sum(part.file_size for part in parts.infolist()) > len(data):
                raise ValueError("it unpacks to more bytes than it has")
            # One pickle with the structure; the other parts are the bytes of tensors.
            [structure] = (part for part in parts.namelist() if part.endswith(".pkl"))
            pickled.read(parts.read(structure))
    except (zipfile.BadZipFile, ValueError) as error:
        raise ValueError(f"{name}: {reason_of(error)}") from None
