"""A checked model's forward on a shard: what a layer outside of the attention needs of other ranks.

Hooks give rotary embeddings the largest position of all ranks, router losses the logits of all
ranks, and pooled heads the token of its owner; they compute losses that the model would compute
over its shard alone, and count the calls of the ring.

Shape legend: B batch, S global length, R rows of one shard, N ranks, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.utils import ModelOutput

from ringray.attention.agreement import refusing
from ringray.attention.sharding import unshard
from ringray.comm.ring import Comm, connect
from ringray.models.huggingface.attention import REFUSED
from ringray.models.huggingface.cache import RingCache
from ringray.models.huggingface.ring import IGNORED, Ring, said, transformers_model
from ringray.models.huggingface.running import Running
from ringray.partition import padded_length

# Tensors of a shard, or of the whole batch, that a forward may get.
_LABELS = "labels", "shift_labels", "num_items_in_batch"
_DEALT = {"input_ids", "inputs_embeds", "position_ids", "token_type_ids", *_LABELS}
# Frequencies of these kinds depend on the largest position of the forward.
_BY_LARGEST = ("dynamic", "longrope")


class Forward:
    """The rules by which one model computes on a ring, found by ``check``, and its hooks.

    ``begin``: position of the first token. ``pooled``: outputs per sequence, of the ``first`` or
    the ``last`` token (``pool``). ``loss``: computed by the model (``own``), or here, from logits
    per token (``tokens``) or per sequence (``pooled``); None is refused, ``why``. ``shifted``:
    labels are of the next token. ``on_trial``: the model is being checked; ``alone``: every token
    attends to itself. ``calls`` of the ring in a forward, ``expected`` once it is known. ``key``
    and ``magnitude`` of positions: what the model was checked for, ``key_of_steps``: with a cache.
    ``several_positions``: checked for mRoPE. ``stepping``: this forward is of new tokens, with a
    cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.key: object = None
        self.key_of_steps: object = None
        self.stepping = self.on_trial = self.alone = self.several_positions = False
        self.magnitude = self.calls = self.begin = 0
        self.ring: Ring | None = None
        self.expected: int | None = None
        self.pool = "first"
        self.pooled: tuple[str, ...] = ()
        self.loss: Literal["own", "tokens", "pooled"] | None = None
        self.why = ""
        self.shifted = True
        self._labels: dict[str, Any] = {}
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, always_call=True)
        for module in model.modules():
            module.checked_by_ringray = True
            kinds = getattr(module, "rope_type", None)
            named = kinds.values() if isinstance(kinds, dict) else [kinds]
            if any(isinstance(x, str) and any(y in x for y in _BY_LARGEST) for x in named):
                module.register_forward_pre_hook(self._with_largest, with_kwargs=True)
                module.register_forward_hook(self._without_largest)
        _gather_router_logits(model)

    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        cache = kwargs.get("past_key_values")
        self.stepping = False
        if isinstance(cache, RingCache) and cache.get_seq_length():
            self.stepping, kwargs = True, cache.step(kwargs, model)
        self.ring = ring = kwargs.get("ring") if isinstance(kwargs.get("ring"), Ring) else None
        Running.forward = None
        if ring is None:
            return None
        if self.key is None and not self.on_trial:
            raise ValueError(
                f"model: {type(model).__name__} is refused, or not checked on this ring; the error "
                "of shard_batch or check says why"
            )
        arguments = kwargs
        if not torch.compiler.is_compiling():
            transformers_model(model)
            positional = inspect.signature(model.forward).parameters
            arguments = dict(zip(positional, args, strict=False)) | kwargs
        for name, value in arguments.items():
            if isinstance(value, Tensor) and name not in _DEALT and name not in REFUSED:
                raise ValueError(
                    f"{name}: got {said(value)}, expected None; shard_batch takes the mask of the "
                    "whole batch, a ring masks by causality, window and documents only, and no "
                    "other tensor is dealt to the ranks"
                )
        if arguments.get("labels") is not None:
            if kwargs.get("labels") is None:
                raise ValueError("labels: got by position, expected by name")
            self._check_labels(arguments, ring)
        self.calls = 0
        Running.forward = self
        if self.loss in ("tokens", "pooled"):
            self._labels = {name: kwargs.pop(name, None) for name in _LABELS}
        return args, kwargs

    def _check_labels(self, arguments: dict[str, Any], ring: Ring) -> None:
        if self.loss is None:
            raise ValueError(self.why)
        if self.loss == "pooled":
            if ring.pooled is None:
                raise ValueError("labels: the Ring has no pooled, expected the one of shard_batch")
            return
        needed = ["num_items_in_batch", *(["shift_labels"] if self.shifted else [])]
        ids = arguments.get("input_ids")
        if any(arguments.get(name) is None for name in needed):
            raise ValueError(
                f"labels: got them without {' and '.join(needed)}, expected all of shard_batch: a "
                "shard knows neither the next token of each row nor the labels of other ranks"
            )
        if isinstance(ids, Tensor) and arguments["labels"].shape != ids.shape:
            raise ValueError(
                f"labels: got {said(arguments['labels'])} for a shard {tuple(ids.shape)}, "
                "expected the labels of shard_batch"
            )

    def _after(self, model: nn.Module, args: Any, out: Any) -> Any:
        ring, Running.forward = self.ring, None
        labels, self._labels = self._labels, {}
        if ring is None or out is None or self.alone:  # None: it raised an error
            return None
        if self.expected not in (None, self.calls) and not torch.compiler.is_compiling():
            with refusing(connect(ring.group)):
                raise ValueError(
                    f"model: {type(model).__name__} attended {self.calls} times by the ring in "
                    f"this forward, expected {self.expected} as when it was checked: some layer "
                    "was skipped (layerdrop), or attends to this rank's rows only"
                )
        if not self.pooled and labels.get("labels") is None:
            return None
        if not isinstance(out, ModelOutput):
            raise ValueError(f"return_dict: got {type(out).__name__}, expected a ModelOutput")
        changes = {name: self._of_owner(out[name], ring) for name in self.pooled if name in out}
        if labels.get("labels") is not None:
            changes["loss"] = self._loss(out | changes, labels, ring)
        return type(out)(**{**out, **changes})

    def _of_owner(self, mine: Tensor, ring: Ring) -> Tensor:
        """Returns the rows of ``mine`` (B, ...), each from the rank that holds its token."""
        if ring.pooled is None:
            raise ValueError("ring: it has no pooled, expected the one of shard_batch")
        here = ring.pooled.view(-1, *[1] * (mine.dim() - 1))
        own = torch.where(here, mine, torch.zeros((), dtype=mine.dtype, device=mine.device))
        return cast("Tensor", _Sum.apply(own, connect(ring.group)))

    def _loss(self, out: dict[str, Any], labels: dict[str, Any], ring: Ring) -> Tensor:
        """Returns this rank's part of the loss of the whole batch."""
        if self.loss == "pooled":
            whole = ForSequenceClassificationLoss(
                labels["labels"], out["logits"], self.model.config
            )
            return cast("Tensor", whole) * share(ring)
        targets = labels["shift_labels" if self.shifted else "labels"]
        mine = per_token(out["logits"], targets, labels["num_items_in_batch"])
        return mine + self.router_loss(out)

    def router_loss(self, out: dict[str, Any]) -> Any:
        """Returns the part of a loss that balances experts, by the coefficient of the config."""
        auxiliary = out.get("aux_loss")
        factor = getattr(self.model.config, "router_aux_loss_coef", 0.0)
        return 0.0 if auxiliary is None else factor * auxiliary

    # Rotary embeddings get one position more, the largest of all ranks.

    def _with_largest(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.ring is None:
            return None
        last = self.ring.last_position
        last = self.ring.seq_len - 1 if last is None else last
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        positions = arguments["position_ids"]
        arguments["position_ids"] = F.pad(positions, (0, 1), value=last)
        return (), arguments

    def _without_largest(self, module: nn.Module, args: Any, out: Any) -> Any:
        if self.ring is None:
            return None
        return tuple(x[..., :-1, :] for x in out) if isinstance(out, tuple) else out[..., :-1, :]


class _Sum(torch.autograd.Function):
    """The sum over all ranks; so is its gradient, as each rank computes a part of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm, x = comm, x.clone()
        comm.sum(x, "pooled outputs")
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        ctx.comm.sum(grad, "gradient of pooled outputs")
        return grad, None


def share(ring: Ring) -> float:
    """Returns the factor of a loss that every rank computes for the whole batch."""
    return 1.0 if ring.gradients == "mean" else 1 / connect(ring.group).world_size


def per_token(logits: Tensor, targets: Tensor, count: Any) -> Tensor:
    """Returns the cross entropy of logits (B, R, V), summed, by ``count`` of targets (B, R)."""
    summed = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return cast("Tensor", summed / count)


def _gather_router_logits(model: PreTrainedModel) -> None:
    """Makes the router loss of the model's module one of all ranks' tokens, each rank's part.

    It is a product of means over tokens, so that the losses of shards do not add up to it.
    """
    module = sys.modules[type(model).__module__]
    original = getattr(module, "load_balancing_loss_func", None)
    if original is None or hasattr(original, "of_one_process"):
        return

    def of_ring(gate_logits: Any, *args: Any, **kwargs: Any) -> Any:
        running = Running.forward
        ring = None if running is None or running.alone else running.ring
        if ring is None or not isinstance(gate_logits, tuple):
            return original(gate_logits, *args, **kwargs)
        ranks = connect(ring.group).world_size
        rows = padded_length(ring.partition, ring.seq_len, ranks) // ranks
        parts = (x.unflatten(0, (-1, rows)) for x in gate_logits)
        whole = tuple(unshard(x, dim=1, **ring.layout).flatten(0, 1) for x in parts)
        return original(whole, *args, **kwargs) * share(ring)

    of_ring.of_one_process = original  # type: ignore[attr-defined]
    module.load_balancing_loss_func = of_ring  # type: ignore[attr-defined]
