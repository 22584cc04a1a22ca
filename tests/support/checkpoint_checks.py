"""Damaged and malicious checkpoints, and checks of every rank that loads them."""

from __future__ import annotations

import builtins
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from ringray.training import checkpoint, checkpoint_files
from ringray.training.checkpoint import CheckpointError, Checkpoints
from ringray.training.checkpoint_files import Reader

MANIFEST = checkpoint_files.MANIFEST


def model(step: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, all of whose numbers say the step."""
    made = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(made.parameters(), lr=step / 8)
    for weight in made.parameters():
        nn.init.constant_(weight, step)
        if step:
            weight.grad = torch.full_like(weight, step)
    if step:
        optimizer.step()
    return made, optimizer


def state(made: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All numbers of a model and its optimizer."""
    moments = [x for one in optimizer.state.values() for x in one.values()]
    return [*made.parameters(), *moments, torch.tensor(optimizer.param_groups[0]["lr"])]


def saves(folder: Path, rank: int, size: int) -> None:
    """Writes the checkpoints of steps 1 and 2, each rank a part of them."""
    checkpoints = Checkpoints(folder)
    for step in (1, 2):
        checkpoints.save(step, *model(step), {"of": step})
    checkpoints.wait()


def accept(facts: dict[str, Any]) -> None:
    """Refuses facts for good, as a training does those of another model."""
    if "of" not in facts:
        raise CheckpointError("these facts are of something else")


def load(folder: Path) -> tuple[int | None, str]:
    """Returns the step whose numbers were loaded, and what was told; the numbers are right."""
    told: list[str] = []
    made, optimizer = model(0)
    facts = Checkpoints(folder, note=told.append).load(made, optimizer, accept)
    if facts is None:
        return None, ""
    assert facts["of"] == facts["step"]
    want = state(*model(facts["step"]))
    for got, wanted in zip(state(made, optimizer), want, strict=True):
        assert torch.equal(got, wanted)
    return facts["step"], " ".join(told)


def loads(folder: Path, step: int, says: str, rank: int, size: int) -> None:
    """Every rank loads the same step; the first one tells why it is not the newest, and that."""
    found, told = load(folder)
    assert found == step
    assert bool(told) is (rank == 0 and bool(says)), told
    if told:
        assert says in told, told
        assert re.match(rf"checkpoint {re.escape(str(folder))}/step-\w+ is damaged: rank ", told), (
            told
        )
        assert told.endswith(f"; the training goes on from step {step}"), told


def is_refused(folder: Path, says: str, rank: int, size: int) -> None:
    with pytest.raises(CheckpointError, match=re.escape(says)):
        load(folder)


def ranks_disagree(folder: Path, rank: int, size: int) -> None:
    """The last rank cannot read the newest: all go on from the one before."""

    def check(reader: Reader) -> dict[str, int]:
        if rank == size - 1 and reader.path == folder / "step-00000002":
            raise MemoryError("of this rank")
        return before(reader)

    before = Reader._check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "_check", check)
        loads(folder, 1, f"rank {size - 1}: MemoryError: of this rank; the", rank, size)


def goes_on_behind_damage(folder: Path, rank: int, size: int) -> None:
    """Two whole checkpoints are kept; the damaged one, which is newer, is gone then."""
    checkpoints = Checkpoints(folder, note=list)
    facts = checkpoints.load(*model(0))
    assert facts["step"] == 1
    dist.barrier()
    assert [place.name[-1] for place in checkpoint.complete(folder)] == ["1", "2"]
    checkpoints.save(3, *model(3), {"of": 3})
    checkpoints.wait()
    dist.barrier()
    assert [place.name[-1] for place in checkpoint.complete(folder)] == ["1", "3"]


def dies_while_it_writes(folder: Path, rank: int, size: int) -> None:
    """The last rank is killed when its file is written, and before any other rank knows."""
    kept = Checkpoints(folder)
    if rank == size - 1:
        checkpoint_files._digest = lambda _: os._exit(9)
    kept.save(3, *model(3), {"of": 3})
    kept.wait()


# Folders of strangers


@dataclass(eq=False)
class Payload:
    """An object whose unpickling leaves a mark."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def payloads(mark: Path) -> list[Payload]:
    return [
        Payload(os.system, (f"touch {mark}",)), Payload(builtins.open, (str(mark), "w")),
        Payload(Path.touch, (mark,)), Payload(torch.save, (1, str(mark))),
    ]  # fmt: skip


class Attack:
    """A checkpoint that is rewritten by someone who knows how it is read."""

    def __init__(self, place: Path, payload: Payload) -> None:
        self.place, self.payload = place, payload
        self.metadata: Metadata = pickle.loads((place / ".metadata").read_bytes())
        self.stored: dict[MetadataIndex, _StorageInfo] = self.metadata.storage_data

    def write(self) -> None:
        (self.place / ".metadata").write_bytes(pickle.dumps(self.metadata))

    def index(self, *, numbers: bool) -> MetadataIndex:
        entries = self.metadata.state_dict_metadata
        return next(
            x for x in self.stored if isinstance(entries[x.fqn], BytesStorageMetadata) is numbers
        )

    def replace(self, index: MetadataIndex, data: bytes) -> None:
        """Puts other data behind those of a file."""
        info = self.stored[index]
        with (self.place / info.relative_path).open("ab") as file:
            self.stored[index] = _StorageInfo(info.relative_path, file.tell(), len(data))
            file.write(data)
        self.write()

    def whole(self) -> None:
        """The metadata are a payload."""
        (self.place / ".metadata").write_bytes(pickle.dumps(self.payload))

    def entry(self) -> None:
        entry: Any = self.metadata.state_dict_metadata[self.index(numbers=False).fqn]
        entry.chunks = self.payload
        self.write()

    def place_of_a_part(self) -> None:
        """Outside of the checkpoint."""
        (self.place.parent / "outside").write_bytes(pickle.dumps(self.payload))
        info: Any = self.stored[self.index(numbers=True)]
        info.relative_path = "../outside"
        self.write()

    def number(self) -> None:
        torch.save(self.payload, data := BytesIO())
        self.replace(self.index(numbers=True), data.getvalue())

    def bare_number(self) -> None:
        self.replace(self.index(numbers=True), pickle.dumps(self.payload, 2))

    def tensor(self) -> None:
        torch.save({"a": torch.zeros(2), "b": self.payload}, data := BytesIO())
        self.replace(self.index(numbers=False), data.getvalue())


def runs_nothing(folder: Path, rank: int, size: int) -> None:
    """Loads checkpoints that were rewritten, with their manifest: the one before is loaded."""
    mark = folder.parent / "mark"
    for way in (
        Attack.whole, Attack.entry, Attack.place_of_a_part, Attack.number, Attack.bare_number,
        Attack.tensor,
    ):  # fmt: skip
        for payload in payloads(mark):
            shutil.copytree(folder, folder.parent / "case")
            place = folder.parent / "case" / "step-00000002"
            way(Attack(place, payload))
            (place / MANIFEST).unlink()
            step, message = load(folder.parent / "case")
            assert (step, mark.exists()) == (1, False), (way, payload.call, message)
            assert "\n" not in message
            shutil.rmtree(folder.parent / "case")
