"""Checkpoints that are complete or absent, written beside training, for any mesh.

    FOLDER/step-00000100/  facts.json  .metadata  __0_0.distcp ...

``torch.distributed.checkpoint`` writes ``.metadata`` last, so a folder without it was interrupted:
it is never loaded, and removed with the next save. Tensors are kept whole, whatever their shards:
another ring size or mesh loads them.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.base.units import memory
from ringray.comm.ring import connect, timeout_of

_COMPLETE, _FACTS, _LOCK = ".metadata", "facts.json", "lock"
# Groups of parameters by name: stages of a pipeline have other parameters under the same numbers.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


class Checkpoints:
    """The checkpoints of one training; every rank has one, until it is closed.

    ``folder``: seen by all ranks; made if it is absent. ``keep``: complete ones that remain.

    Raises:
        CheckpointError: on every rank, the folder cannot be used, or another training has it.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        with refusing(comm := connect(None)):
            self.folder, self._keep = Path(folder), keep
            agree(comm, AgreedCall("checkpoints", folder=str(self.folder), keep=keep))
        self._rank = dist.get_rank()
        # Its messages must not meet those of training, which go on meanwhile.
        self._group = dist.new_group(backend="gloo", timeout=timeout_of(dist.group.WORLD))
        self._comm = connect(self._group)
        self._writing: Any = None
        self._lock: IO[str] | None = None
        refused: list[str | None] = [self._take() if self._rank == 0 else None]
        dist.broadcast_object_list(refused, group=self._group)
        if refused[0] is not None:
            raise CheckpointError(f"checkpoints {self.folder}: {refused[0]}")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the folder to other trainings; the end of the process does so, too."""
        if self._lock is not None:
            self._lock.close()

    def _take(self) -> str | None:
        """Locks the folder; returns the reason if that cannot be done."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "another training writes there; give each a folder of its own"
        except OSError as error:
            return str(error)
        return None

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
            place = self.folder / f"step-{step:08d}"
            if self._rank == 0:
                for old in self._interrupted():
                    shutil.rmtree(old, ignore_errors=True)
                place.mkdir(parents=True, exist_ok=True)
                (place / _COMPLETE).unlink(missing_ok=True)  # it is written anew
                (place / _FACTS).write_text(json.dumps({**facts, "step": step}), encoding="utf-8")
            agree(self._comm, AgreedCall("save", step=step, folder=str(self.folder)))
        dist.barrier(self._group)
        weights, moments = get_state_dict(model, optimizer, options=_FLAT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an existing folder, which has the facts
            self._writing = async_save(
                {"model": weights, "optimizer": moments},
                checkpoint_id=place,
                process_group=self._group,
            )

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
            for old in complete(self.folder)[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Loads the newest complete checkpoint, and returns its facts; None if there is none.

        Raises:
            CheckpointError: it is of another model, or damaged.
        """
        with refusing(self._comm):
            recorded, steps = facts(self.folder), complete(self.folder)
            agree(self._comm, AgreedCall("load", checkpoint=steps[-1:], facts=recorded))
        if recorded is None:
            return None
        place = steps[-1]
        weights, moments = get_state_dict(model, optimizer, options=_FLAT)
        try:
            state: dict[str, Any] = {"model": weights, "optimizer": moments}
            load(state, checkpoint_id=place, process_group=self._group)
        except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
            raise CheckpointError(f"checkpoint {place}: {_told(error)}") from None
        set_state_dict(
            model, optimizer, model_state_dict=state["model"],
            optim_state_dict=state["optimizer"], options=_FLAT,
        )  # fmt: skip
        return recorded

    def _interrupted(self) -> list[Path]:
        return [one for one in self.folder.glob("step-*") if not (one / _COMPLETE).exists()]


def _told(error: BaseException) -> str:
    """Writes an error in a line; of one that ranks gathered the first rank's own."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_told(first)}"
    return f"{type(error).__name__}: {error}"[:300]


def complete(folder: str | Path) -> list[Path]:
    """Returns the complete checkpoints of a folder, the newest last."""
    return sorted(one.parent for one in Path(folder).glob(f"step-*/{_COMPLETE}"))


def facts(folder: str | Path) -> dict[str, Any] | None:
    """Returns the facts of the newest complete checkpoint; None if there is none."""
    there = complete(folder)
    if not there:
        return None
    try:
        return dict(json.loads((there[-1] / _FACTS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint {there[-1]}: {error}") from None
