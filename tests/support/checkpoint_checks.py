"""Damaged and malicious checkpoints, and checks of every rank that loads them."""

from __future__ import annotations

import builtins
import hashlib
import json
import logging
import os
import pickle
import random
import re
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from ringray.training import checkpoint, checkpoint_files
from ringray.training.checkpoint import CheckpointError, Checkpoints
from ringray.training.checkpoint_files import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

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
    with Checkpoints(folder) as kept:
        for step in (1, 2):
            kept.save(step, *model(step), {"of": step})
        kept.wait()


def saves_under(umask: int, folder: Path, rank: int, size: int) -> None:
    before = os.umask(umask)
    try:
        saves(folder, rank, size)
    finally:
        os.umask(before)


def accept(facts: dict[str, Any]) -> None:
    """Refuses facts for good, as a training does those of another model."""
    if "of" not in facts:
        raise CheckpointError("these facts are of something else")


def load(folder: Path) -> tuple[int | None, str]:
    """Returns the step whose numbers were loaded, and what was told; the numbers are right."""
    told: list[str] = []
    made, optimizer = model(0)
    with Checkpoints(folder, note=told.append) as kept:
        facts = kept.load(made, optimizer, accept)
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
    with Checkpoints(folder, note=list) as kept:
        facts = kept.load(*model(0))
        assert facts is not None
        assert facts["step"] == 1
        dist.barrier()
        assert [place.name[-1] for place in checkpoint.complete(folder)] == ["1", "2"]
        kept.save(3, *model(3), {"of": 3})
        kept.wait()
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


def payload(mark: Path, drawn: random.Random) -> Payload:
    text = f"open({str(mark)!r}, 'w')"
    return drawn.choice(
        [
            Payload(os.system, (f"touch {mark}",)), Payload(os.mkdir, (str(mark),)),
            Payload(builtins.eval, (text,)), Payload(builtins.exec, (text,)),
            Payload(builtins.open, (str(mark), "w")), Payload(Path.touch, (mark,)),
            Payload(subprocess.getoutput, (f"touch {mark}",)),
            Payload(subprocess.Popen, (["touch", str(mark)],)),
            Payload(np.save, (str(mark), [1])), Payload(np.memmap, (str(mark), "u1", "w+", 0, 1)),
            Payload(torch.save, (1, str(mark))), Payload(logging.FileHandler, (str(mark),)),
            Payload(torch.utils.collect_env.run, (f"touch {mark}",)),
        ]
    )  # fmt: skip


class Attack:
    """A checkpoint that is rewritten by someone who knows how it is read."""

    def __init__(self, place: Path, drawn: random.Random) -> None:
        self.place, self.drawn = place, drawn
        self.mark = place.parent.parent / "mark"
        self.metadata: Metadata = pickle.loads((place / ".metadata").read_bytes())
        self.stored: dict[MetadataIndex, _StorageInfo] = self.metadata.storage_data

    def write(self) -> None:
        data = pickle.dumps(self.metadata, self.drawn.choice([2, 4, 5]))
        (self.place / ".metadata").write_bytes(data)

    def payload(self) -> Payload:
        return payload(self.mark, self.drawn)

    def an_index(self, *, numbers: bool) -> MetadataIndex:
        entries = self.metadata.state_dict_metadata
        return self.drawn.choice(
            [x for x in self.stored if isinstance(entries[x.fqn], BytesStorageMetadata) is numbers]
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
        data = pickle.dumps(self.payload(), self.drawn.randrange(6))
        (self.place / ".metadata").write_bytes(data)

    def field(self) -> None:
        name = self.drawn.choice(["planner_data", "storage_meta", "version", "storage_data"])
        setattr(self.metadata, name, self.drawn.choice([self.payload(), [self.payload()]]))
        self.write()

    def entry(self) -> None:
        index = self.an_index(numbers=False)
        entry: Any = self.metadata.state_dict_metadata[index.fqn]
        setattr(entry, self.drawn.choice(["size", "chunks"]), self.payload())
        self.write()

    def place_of_a_part(self) -> None:
        info: Any = self.stored[self.an_index(numbers=self.drawn.random() < 0.5)]
        values = [self.payload(), -1, 1 << 70, "../../mark", str(self.mark), None, ((),)]
        name = self.drawn.choice(["relative_path", "offset", "length"])
        setattr(info, name, self.drawn.choice(values))
        self.write()

    def key(self) -> None:
        self.metadata.state_dict_metadata[self.payload()] = None  # type: ignore[index, assignment]
        self.write()

    def number(self) -> None:
        """A number is a payload, or pickled alone."""
        data = BytesIO()
        torch.save(self.payload(), data)
        made = [data.getvalue(), pickle.dumps(self.payload(), 2)]
        self.replace(self.an_index(numbers=True), self.drawn.choice(made))

    def tensor(self) -> None:
        torch.save({"a": torch.zeros(2), "b": self.payload()}, data := BytesIO())
        self.replace(self.an_index(numbers=False), data.getvalue())

    def other_kind(self) -> None:
        """A text or a list in place of a tensor or a number."""
        torch.save(self.drawn.choice(["text", [1], torch.zeros(3, 3)]), data := BytesIO())
        self.replace(self.an_index(numbers=self.drawn.random() < 0.5), data.getvalue())

    def keys_for_ever(self) -> None:
        """Keys whose hash takes for ever, or ends the process by recursion."""
        deep = b")" + self.drawn.choice([b"\x85" * 200_000, b"q\x01h\x01\x86" * 60])
        data = b"\x80\x02}" + deep + b"K\x01s."
        if self.drawn.random() < 0.5:
            (self.place / ".metadata").write_bytes(data)
            return
        with zipfile.ZipFile(parts := BytesIO(), "w") as file:
            for name, content in (("data.pkl", data), ("version", b"3"), ("byteorder", b"little")):
                file.writestr(f"archive/{name}", content)
        self.replace(self.an_index(numbers=True), parts.getvalue())

    def bomb(self) -> None:
        """A tensor that unpacks to a thousand times its bytes."""
        torch.save(torch.zeros(1 << 22), data := BytesIO())
        with (
            zipfile.ZipFile(data) as have,
            zipfile.ZipFile(packed := BytesIO(), "w", zipfile.ZIP_DEFLATED) as file,
        ):
            for name in have.namelist():
                file.writestr(name, have.read(name))
        self.replace(self.an_index(numbers=False), packed.getvalue())

    def memo(self) -> None:
        """An instruction that lets pickle take gigabytes."""
        data = b"\x80\x04]r\xff\xff\xff\xff."
        (self.place / ".metadata").write_bytes(data)

    def text(self) -> None:
        """Facts or manifest of any kind."""
        texts = ["", "[]", "[" * 100_000, '{"step": "2"}', "9" * 5000, "[[1, 2]]", '{"a": [1]}']
        name = self.drawn.choice(["facts.json", MANIFEST])
        (self.place / name).write_text(self.drawn.choice(texts))

    def kind_of_file(self) -> None:
        """A pipe, a link, a folder, a file of zeros without an end."""
        name = self.drawn.choice(["facts.json", ".metadata", "__0_0.distcp", MANIFEST])
        path = self.place / name
        path.unlink(missing_ok=True)
        outside = self.place.parent.parent / "outside"
        outside.write_bytes(b"{}")
        makes: list[Callable[[], object]] = [
            lambda: os.mkfifo(path, 0o600), path.mkdir, lambda: path.symlink_to(outside),
            lambda: path.symlink_to("/dev/zero"), lambda: os.truncate(path, 1 << 40),
        ]  # fmt: skip
        if (make := self.drawn.choice(makes)) is makes[-1]:
            path.touch()
        make()


class Damage:
    """A checkpoint on a disk that fails."""

    def __init__(self, place: Path, drawn: random.Random) -> None:
        self.drawn = drawn
        self.path = drawn.choice(sorted(place.iterdir()))
        self.data = bytearray(self.path.read_bytes())

    def truncated(self) -> None:
        self.path.write_bytes(self.data[: self.drawn.randrange(len(self.data))])

    def flipped(self) -> None:
        self.data[self.drawn.randrange(len(self.data))] ^= 1 << self.drawn.randrange(8)
        self.path.write_bytes(self.data)

    def longer(self) -> None:
        self.path.write_bytes(self.data + b"\0")

    def lost(self) -> None:
        self.path.unlink()

    def of_the_step_before(self) -> None:
        shutil.copy(self.path.parent.parent / "step-00000001" / self.path.name, self.path)


ATTACKS = [name for name in vars(Attack) if not name.startswith("_")]
for helper in ("write", "payload", "an_index", "replace"):
    ATTACKS.remove(helper)
DAMAGES = [name for name in vars(Damage) if not name.startswith("_")]


def fuzz(folder: Path, seeds: range, rank: int, size: int) -> None:
    """Loads ``folder`` after many kinds of damage: right values, an earlier checkpoint, or one
    sentence, and nothing of a file has run."""
    outcomes = dict.fromkeys((1, 2, None), 0)
    for seed in seeds:
        drawn = random.Random(seed)
        case = folder.parent / f"{folder.name}-{seed}"
        shutil.copytree(folder, case / "kept")
        place = case / "kept" / "step-00000002"
        name = [*DAMAGES, *ATTACKS, *ATTACKS][seed % (len(DAMAGES) + 2 * len(ATTACKS))]
        if name in DAMAGES:
            getattr(Damage(place, drawn), name)()
        else:
            if seed % 2:
                (place / MANIFEST).unlink()
            getattr(Attack(place, drawn), name)()
            if not seed % 2:
                _write_manifest(place)
        if drawn.random() < 0.2:
            shutil.rmtree(case / "kept" / "step-00000001")
        try:
            step, told = load(case / "kept")
            assert step == 2 or "step 1" in told or name == "lost", (name, told)
        except CheckpointError as error:
            step = None
            told = str(error)
            assert str(case) in told, (seed, name)
            assert "\n" not in told, (seed, name)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {name}") from error
        assert not (case / "mark").exists(), (seed, name)
        outcomes[step] += 1
        shutil.rmtree(case)
    assert min(outcomes.values()) > 0, outcomes


def _write_manifest(place: Path) -> None:
    """As the one who rewrites a checkpoint can."""
    files = {}
    for path in place.iterdir():
        if path.name != MANIFEST and path.is_file() and path.stat().st_size < 1 << 30:
            data = path.read_bytes() if not path.is_symlink() else b""
            files[path.name] = len(data), hashlib.blake2b(data).hexdigest()
    if not (place / MANIFEST).exists() or (place / MANIFEST).is_file():
        (place / MANIFEST).write_text(json.dumps(files))
