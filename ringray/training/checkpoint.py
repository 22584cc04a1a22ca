"""Checkpoints that are complete or absent, written beside training, for any mesh.

    FOLDER/step-00000100/  facts.json  .metadata  __0_0.distcp ...  manifest.json

A folder gets its name when all is written: what was interrupted has the suffix ``.part``, is never
loaded, and is removed with the next save. Of a damaged one the digests in its manifest tell, and
the one before is loaded. Tensors are kept whole, whatever their shards: another ring size or mesh
loads them.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.base import private_files
from ringray.base.errors import reason_of
from ringray.base.units import memory
from ringray.comm.ring import connect, timeout_of
from ringray.training.checkpoint_files import FACTS, METADATA, PART, Planner, Reader, Writer

# Groups of parameters by name: stages of a pipeline have other parameters under the same numbers.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


class Checkpoints:
    """The checkpoints of one training; every rank has one.

    ``folder``: of this training alone, seen by all ranks; made if it is absent. ``keep``: complete
    ones that remain. ``note``: is told on rank 0 of damaged ones that were not loaded.

    Raises:
        CheckpointError: on the first rank, the folder cannot be made; the others raise a
            ``RefusedError``.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 2, note: Callable[[str], object] = warnings.warn
    ) -> None:
        self.folder, self._keep, self._note = Path(folder), keep, note
        self._rank = dist.get_rank()
        with refusing(comm := connect(None)):
            if self._rank == 0:
                try:
                    private_files.above(self.folder / FACTS)
                except OSError as error:
                    raise CheckpointError(f"checkpoints {folder}: {reason_of(error)}") from None
            agree(comm, AgreedCall("checkpoints", folder=str(self.folder), keep=keep))
        # Its messages must not meet those of training, which go on meanwhile.
        self._group = dist.new_group(backend="gloo", timeout=timeout_of(dist.group.WORLD))
        self._comm = connect(self._group)
        self._writing: Any = None
        self._damaged: set[Path] = set()  # complete, but not to go on from

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        facts: Mapping[str, Any],
    ) -> None:
        """Copies the state behind ``step`` and begins to write it; waits for the one before.
        ``facts``: JSON-able, the same on every rank."""
        self.wait()
        with refusing(self._comm):
            place = self.folder / f"step-{step:08d}{PART}"
            if self._rank == 0:
                for old in {*self.folder.glob("step-*")} - {*complete(self.folder)}:
                    shutil.rmtree(old, ignore_errors=True)
                place.mkdir()
                (place / FACTS).write_text(json.dumps({**facts, "step": step}), encoding="utf-8")
            agree(self._comm, AgreedCall("save", step=step, folder=str(self.folder)))
        dist.barrier(self._group)
        self._damaged.discard(place.with_suffix(""))
        weights, moments = get_state_dict(model, optimizer, options=_FLAT)
        values: dict[str, Any] = {**moments}
        for name, value in values.items():
            if isinstance(value, np.generic):  # a learning rate
                values[name] = value.item()
        state = {"model": weights, "optimizer": values}
        self._writing = async_save(state, storage_writer=Writer(place), process_group=self._group)

    def wait(self) -> None:
        """Waits until the last save is complete; removes those beyond ``keep``.

        Raises:
            CheckpointError: it could not be written; the one before is still there.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        with refusing(self._comm):
            try:
                writing.result()
            except (OSError, RuntimeError, CheckpointException) as error:
                # torch says of a full disk that a position is wrong.
                free = f"{memory(shutil.disk_usage(self.folder).free)} free there"
                raise CheckpointError(
                    f"checkpoints {self.folder}, {free}: {_told(error)}"
                ) from None
            agree(self._comm, AgreedCall("wait", folder=str(self.folder)))
        dist.barrier(self._group)
        if self._rank == 0:
            there = complete(self.folder)
            whole = [place for place in there if place not in self._damaged]
            for old in {*there} - {*whole[-self._keep :]}:
                shutil.rmtree(old, ignore_errors=True)

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accept: Callable[[dict[str, Any]], object] = bool,
    ) -> dict[str, Any] | None:
        """Loads the newest complete checkpoint that is not damaged, and returns its facts; None if
        there is none at all. ``accept``: gets the facts before anything is loaded, and may raise.

        Raises:
            CheckpointError: on every rank, all are damaged, or ``accept`` raises one.
        """
        with refusing(self._comm):
            places = complete(self.folder)
            agree(self._comm, AgreedCall("load", checkpoints=[place.name for place in places]))
        damage: list[str] = []
        for place in reversed(places):
            weights, moments = get_state_dict(model, optimizer, options=_FLAT)
            state: dict[str, Any] = {"model": weights, "optimizer": moments}
            reader = Reader(place, self._rank, dist.get_world_size(), accept)
            try:
                load(state, storage_reader=reader, planner=Planner(), process_group=self._group)
            except CheckpointException as error:
                if any(isinstance(first, CheckpointError) for first, _ in error.failures.values()):
                    raise CheckpointError(f"checkpoint {place}: {_told(error)}") from None
                damage.append(f"checkpoint {place} is damaged: {_told(error)}")
                self._damaged.add(place)
                continue
            loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(model, optimizer, **loaded, options=_FLAT)
            agree(self._comm, AgreedCall("load", facts=reader.facts))
            if damage and self._rank == 0:
                step = reader.facts["step"]
                self._note(f"{'; '.join(damage)}; the training goes on from step {step}")
            return reader.facts
        if damage:
            raise CheckpointError(f"{'; '.join(damage)}; there is none before it")
        return None


def _told(error: BaseException) -> str:
    """Writes an error in a line; of one that ranks gathered the first rank's own."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_told(first)}"
    if isinstance(error, UnpicklingError):  # torch tells how to run what the file holds
        return "it holds more than tensors and numbers"
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:300]


def complete(folder: str | Path) -> list[Path]:
    """Returns the complete checkpoints of a folder, the newest last."""
    places = (path.parent for path in Path(folder).glob(f"step-*/{METADATA}"))
    return sorted(place for place in places if place.suffix != PART)
