"""Functions of a target unless its file or its adapter says otherwise."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ringray.nn import sharded_cross_entropy
from ringray.verification.target import TargetError

LOSS = "mean"
UNIT, BATCH, SEQ_LEN = 1, 2, 48
loss_is = LOSS  # the target's own LOSS, once it is loaded: a process has one target
_NO_LOSS = (
    "the model returns no loss: compared is ringray's cross entropy of its logits (where its loss "
    "needs labels, its forward takes them as shift_labels, or the target has a step())"
)
# What models call the arguments of their forward; docs/verify.md has the list.
_SYNONYMS = {
    "tokens": "input_ids",
    "ids": "input_ids",
    "x": "input_ids",
    "positions": "position_ids",
    "pos": "position_ids",
    "cu_seq_lens": "cu_seqlens",
    "targets": "shift_labels",
}


def prepare(model: nn.Module) -> nn.Module:
    """Leaves the model as it is."""
    return model


def context() -> AbstractContextManager[None]:
    """Adds nothing to a step."""
    return nullcontext()


def shard(batch: dict[str, Any]) -> dict[str, Any]:
    """Leaves the batch whole, as one process has it."""
    return batch


def arguments(model: nn.Module, batch: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns what the model's forward takes of a batch, by its own names, and ``options``; the
    first argument is the token ids, whatever its name.

    Raises:
        TargetError: it needs another argument.
    """
    inner = getattr(model, "module", model)
    parameters = inspect.signature(inner.forward).parameters
    if not is_transformers(inner):  # others do not shift labels themselves, or not all
        batch = {name: x for name, x in batch.items() if name != "labels"}
    plain = {name: _SYNONYMS.get(name, name) for name in parameters}
    taken = {name: batch[x] for name, x in plain.items() if x in batch}
    if "input_ids" not in plain.values():
        taken[next(iter(parameters))] = batch["input_ids"]
    if takes_all(model) and "ring" in batch:
        taken |= {name: x for name, x in batch.items() if name not in parameters}
    if "use_cache" in parameters:  # with a cache, transformers takes packed documents for one
        taken["use_cache"] = False
    taken |= options
    needed = [x for x in parameters.values() if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    if missing := [x.name for x in needed if x.default is x.empty and x.name not in taken]:
        raise TargetError(
            f"{type(inner).__name__}.forward() needs {', '.join(missing)}, which are not passed: "
            "docs/verify.md has the names that are (labels of the next token are shift_labels); "
            "write step()"
        )
    return taken


def is_transformers(model: nn.Module) -> bool:
    """Tells whether it is a model of transformers, which is imported where there is one."""
    hf = sys.modules.get("transformers.modeling_utils")
    return hf is not None and isinstance(model, hf.PreTrainedModel)


def takes_all(model: nn.Module) -> bool:
    """Tells whether the model's forward takes keywords of any name."""
    parameters = inspect.signature(getattr(model, "module", model).forward).parameters
    return any(x.kind is x.VAR_KEYWORD for x in parameters.values())


def step(model: nn.Module, batch: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Runs a forward, with ``options`` beside them; the loss is the model's own, or the mean over
    all labels of all ranks, which ``note`` says.

    Raises:
        TargetError: nothing that the model returns is the logits or the loss for sure.
    """
    logits, loss = _results(model(**arguments(model, batch, **options)), batch["input_ids"])
    note = "" if loss is not None else _NO_LOSS
    if loss is None and logits is not None:
        loss = sharded_cross_entropy(logits, batch["shift_labels"], gradients="mean")
        # The same on every rank: as parts of a sum, each has its share.
        loss = loss / dist.get_world_size() if loss_is == "sum" else loss
    return {"logits": logits, "loss": loss, "note": note}


def _results(out: Any, ids: Tensor) -> tuple[Any, Any]:
    """Returns the logits and the loss of what a model returns for ids (B, R): those that have these
    names, or else the first tensor (B, R, V) and the only number."""
    fields = out if isinstance(out, Mapping) else getattr(out, "__dict__", {})
    parts = [*out] if isinstance(out, list | tuple) else [*fields.values()] or [out]
    tensors = [x for x in parts if isinstance(x, Tensor)]
    numbers = [x for x in tensors if not x.dim()]
    logits, loss = fields.get("logits"), fields.get("loss")
    if loss is None and numbers:
        loss, *others = numbers
        if others:
            raise TargetError(
                f"the model returns {len(numbers)} numbers: say in step() what they are"
            )
    if logits is None:
        logits = next((x for x in tensors if x.shape[:-1] == ids.shape), None)
    if logits is None and loss is None:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in parts]
        raise TargetError(
            f"the model returns {', '.join(map(str, shapes))}, expected logits (B, R, V) of the "
            f"token ids (B, R), {tuple(ids.shape)}, a loss (), or both: write step()"
        )
    return logits, loss


def reduce(model: nn.Module) -> None:
    """Averages gradients over all ranks, or sums them where losses add up; DDP and FSDP do so
    themselves."""
    wrappers = (DistributedDataParallel, FSDPModule)
    if dist.get_world_size() == 1 or any(isinstance(x, wrappers) for x in model.modules()):
        return
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            if loss_is == "mean":
                weight.grad /= dist.get_world_size()


def grad_norm(model: nn.Module) -> float:
    """Returns the norm of the gradients, as PyTorch clips them."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def save(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the states of both."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the states of both."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
