"""What a target does unless its file or its adapter says otherwise."""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ringray.nn import sharded_cross_entropy

LOSS = "mean"
UNIT, BATCH, SEQ_LEN = 1, 2, 48
# Share of the norm of logits by which documents that see each other differ, at least.
_LEAK = 0.01
# What models call the arguments of their forward.
_SYNONYMS = {
    "tokens": "input_ids", "ids": "input_ids", "x": "input_ids", "positions": "position_ids",
    "pos": "position_ids", "cu_seq_lens": "cu_seqlens", "targets": "shift_labels",
}  # fmt: skip


def prepare(model: nn.Module) -> nn.Module:
    """Leaves the model as it is."""
    return model


def context() -> AbstractContextManager[None]:
    """Adds nothing to a step."""
    return nullcontext()


def arguments(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Returns what the model's forward takes of a batch, by its own names; the first argument is
    the token ids, whatever its name."""
    inner = getattr(model, "module", model)
    parameters = inspect.signature(inner.forward).parameters
    if not hasattr(inner, "config"):  # only transformers' models shift labels themselves
        batch = {name: x for name, x in batch.items() if name != "labels"}
    taken = {name: batch[_SYNONYMS.get(name, name)] for name in parameters
             if _SYNONYMS.get(name, name) in batch}  # fmt: skip
    first = next(iter(parameters))
    if not {"input_ids", "inputs_embeds"} & {_SYNONYMS.get(name, name) for name in taken}:
        taken[first] = batch["input_ids"]
    if takes_all(model) and "ring" in batch:
        taken |= {name: x for name, x in batch.items() if name not in parameters}
    if "use_cache" in parameters:  # with a cache, transformers takes packed documents for one
        taken["use_cache"] = False
    return taken


def is_transformers(model: nn.Module) -> bool:
    """Tells whether it is a model of transformers, which is imported where there is one."""
    hf = sys.modules.get("transformers.modeling_utils")
    return hf is not None and isinstance(model, hf.PreTrainedModel)


def _documents_apart(model: nn.Module, batch: dict[str, Any]) -> Tensor | None:
    """Returns logits (B, S, V) of a model of transformers that runs on one document at a time."""
    if not is_transformers(model):
        return None
    names = "input_ids", "position_ids"
    parts = (
        model(**arguments(model, {name: batch[name][:, begin:end] for name in names})).logits
        for begin, end in pairwise(batch["cu_seqlens"].tolist())
    )
    return torch.cat([*parts], 1)


def takes_all(model: nn.Module) -> bool:
    """Tells whether the model's forward takes keywords of any name."""
    parameters = inspect.signature(getattr(model, "module", model).forward).parameters
    return any(x.kind is x.VAR_KEYWORD for x in parameters.values())


def step(model: nn.Module, batch: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Runs a forward, with ``options`` beside them; the loss is the model's own, or the mean over
    all labels of all ranks."""
    out = model(**arguments(model, batch) | options)
    if isinstance(out, Tensor):
        out = {"logits": out} if out.dim() else {"logits": None, "loss": out}
    elif isinstance(out, tuple):
        out = {"logits": next((x for x in out if isinstance(x, Tensor) and x.dim() == 3), None)}
    named = out.get if hasattr(out, "get") else partial(getattr, out)
    logits, loss = named("logits", None), named("loss", None)
    if logits is not None and dist.get_world_size() == 1 and "cu_seqlens" in batch:
        apart = _documents_apart(model, batch)
        # Some models of transformers do not see where documents begin.
        if apart is not None and (apart - logits).norm() > _LEAK * apart.norm():
            logits, loss = apart, None
    if loss is None and logits is not None:
        loss = sharded_cross_entropy(logits, batch["shift_labels"], gradients="mean")
    return {"logits": logits, "loss": loss}


def reduce(model: nn.Module, loss: str = LOSS) -> None:
    """Averages gradients over all ranks as the ``loss`` is, or sums them; DDP and FSDP do so
    themselves."""
    wrappers = (DistributedDataParallel, FSDPModule)
    if dist.get_world_size() == 1 or any(isinstance(x, wrappers) for x in model.modules()):
        return
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            if loss == "mean":
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
