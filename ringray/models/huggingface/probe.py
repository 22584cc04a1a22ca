"""The check of a model, once, before its first forward on a ring: it computes there what it
computes in one process, or it is refused.

The model itself runs on a few tokens, on every rank, without gradients and in evaluation mode:

1. Tokens meet in attention layers only: ``mixing``.
2. The whole probe in one process, by the model's eager attention, and on the ring: outputs and loss
   are equal, else with the next rule for positions, else the model is refused.
3. The same at the last positions of the batch.

Shape legend: B batch, L tokens of the probe, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.utils import ModelOutput

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.sharding import unshard
from ringray.comm.ring import connect
from ringray.models.huggingface.batch import deal
from ringray.models.huggingface.forward import Forward, per_token
from ringray.models.huggingface.mixing import (
    draw_tokens,
    float_outputs,
    refuse_mixing,
    unlike_sizes,
)
from ringray.models.huggingface.ring import IGNORED, NAME, Ring, padding_token, transformers_model
from ringray.models.trial import refuse_batch_norm, trying
from ringray.partition import DEFAULT, Dealt, padded_length

_NUMBERS: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}  # of tensors that are drawn
# Filled in by ``save_pretrained``, which one rank alone may call: no reason to check again.
_SAVED = ("architectures", "dtype")


def check(
    model: nn.Module, ring: Ring, *, alone: bool = False, several_positions: bool = False
) -> Forward:
    """Checks that a model computes on a ring what it computes in one process; all ranks call it.

    ``shard_batch`` calls it. Later calls return at once, until the model's config, the partition,
    or the ranks change, or positions become twice as large. ``alone``: it sends nothing, and checks
    only that tokens meet in attention layers, by which no model passes. ``several_positions``: also
    with three positions of each token (mRoPE).

    Raises:
        ValueError: on every rank, a model that does not, and why.
    """
    inner = transformers_model(model)
    forward = getattr(inner, "forward_on_ring", None)
    if not isinstance(forward, Forward):
        forward = Forward(inner)
        inner.forward_on_ring = forward
    last = ring.seq_len - 1 if ring.last_position is None else ring.last_position
    ranks = connect(ring.group).world_size
    ring = _undealt(ring)
    config = {name: x for name, x in inner.config.to_dict().items() if name not in _SAVED}
    key = (str(config), ring.partition, ranks)
    several = several_positions or (forward.key == key and forward.several_positions)
    passed = forward.key == key and several == forward.several_positions
    if passed and last.bit_length() <= forward.magnitude:
        return forward
    forward.key = None
    if getattr(inner.config, "is_encoder_decoder", False):
        raise ValueError(
            f"model: {type(inner).__name__} is an encoder with a decoder, whose cross "
            "attention a ring does not compute; expected one of them"
        )
    refuse_batch_norm(inner)
    with refusing(connect(ring.group)), probing(model, forward):
        ring = replace(ring, cu_seqlens=None, prefix=None, gradients="sum")
        if alone:
            refuse_mixing(model, forward, ring, last + 1)
            return forward
        Probe(model, forward, ring, last, 3 if several else 1).run()
    forward.key, forward.magnitude = key, last.bit_length()
    forward.several_positions = several
    return forward


def _undealt(ring: Ring) -> Ring:
    """Returns a ring without the deal of one batch: a model is tried on other tokens."""
    return replace(ring, partition=DEFAULT) if isinstance(ring.partition, Dealt) else ring


@contextmanager
def probing(model: nn.Module, forward: Forward) -> Iterator[None]:
    """Runs the block as ``trying`` does, where the model's forward does not refuse."""
    forward.on_trial = True
    try:
        with trying(model):
            yield
    finally:
        forward.on_trial = False


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Makes all parts of the model attend by transformers' eager attention in the block."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = [(c, c._attn_implementation) for c in configs.values() if hasattr(c, "sub_configs")]
    try:
        for config, was in before:
            if was == NAME:
                config._attn_implementation = "eager"
        yield
    finally:
        for config, was in before:
            config._attn_implementation = was


class Probe:
    """One check of a model: its tokens, and the rules that it finds for ``forward``."""

    def __init__(
        self, model: nn.Module, forward: Forward, ring: Ring, last: int, positions: int = 1
    ) -> None:
        self.model, self.forward, self.last, self.positions = model, forward, last, positions
        self.inner = forward.model
        self.comm = connect(ring.group)
        ring = _undealt(ring)
        unit = padded_length(ring.partition, 1, self.comm.world_size)
        length = unit * max(3, 16 // unit + 1) - 1  # with padding, where there are several ranks
        self.ring = replace(
            ring, seq_len=unlike_sizes(self.inner, min(ring.seq_len, length)), last_position=None
        )
        self.device = next(self.inner.parameters()).device
        dtypes = {x.dtype for x in self.inner.parameters()}
        for part in self.inner.modules():
            if isinstance(part, FSDPModule):  # it may compute in another dtype than its weights'
                dtypes.add(part._get_fsdp_state()._mp_policy.param_dtype or torch.float32)
        exact = (
            torch.get_float32_matmul_precision() == "highest"
            and not torch.is_autocast_enabled(self.device.type)
            and dtypes == {torch.float32}
        )
        self.allowed = 1e-3 if exact else 0.1
        self.allowed_loss = 2e-5 if exact else 2e-2

    def run(self) -> None:
        self.forward.loss = None
        kind = getattr(self.inner.config, "problem_type", None)  # losses fill it in
        try:
            self._run()
        except ValueError:
            raise
        except Exception as error:
            where = " with position_ids of three rows (mRoPE)" if self.positions > 1 else ""
            raise ValueError(
                f"model: {type(self.inner).__name__} does not run on a shard{where}: "
                f"{type(error).__name__}: {str(error)[-200:]}"
            ) from error
        finally:
            self.inner.config.problem_type = kind

    def _run(self) -> None:
        refuse_mixing(self.model, self.forward, self.ring, self.last + 1)
        ids = draw_tokens(self.inner, self.ring.seq_len)
        want, labels = self._in_one_process(ids)
        self._compare(ids, want, labels)
        if self.last >= self.ring.seq_len or self.positions > 1:
            self._compare_last(ids)

    def _call(self, ids: Tensor, **arguments: Any) -> Any:
        return self.model(input_ids=ids, **{"use_cache": False, **arguments})

    def _in_one_process(self, ids: Tensor) -> tuple[Any, Tensor | None]:
        """Returns the outputs of the whole probe, with labels if the model computes a loss."""
        forward = self.forward
        forward.loss, forward.why = None, "labels: the model's forward takes none; omit them"
        with eager(self.model):
            want = self._call(ids)
            logits = want.get("logits")
            if logits is None or "labels" not in inspect.signature(self.inner.forward).parameters:
                return want, None
            labels = self._labels(ids, logits)
            labelled = self._call(ids, labels=labels)
            self._find_loss(ids, labelled, labels)
        return labelled, labels if forward.loss else None

    def _labels(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Draws labels: for every second token or more, or of the kind that the head takes."""
        kind, count = self.inner.config.problem_type, logits.shape[-1]
        generator = torch.Generator().manual_seed(1)
        if logits.dim() == 3:
            drawn = torch.randint(count, ids.shape, generator=generator, **_NUMBERS)
            drawn[:, 1::3] = IGNORED
        elif kind == "single_label_classification" or (kind is None and count > 1):
            drawn = torch.randint(count, (1,), generator=generator, **_NUMBERS)
        else:
            drawn = torch.rand(1, count, generator=generator, dtype=torch.float32, device="cpu")
            drawn = drawn.to(logits.dtype)
        return drawn.to(self.device)

    def _find_loss(self, ids: Tensor, outputs: Any, labels: Tensor) -> None:
        """Finds which loss the model computes, and whether it does so for a shard as well."""
        forward, logits, loss = self.forward, outputs["logits"], float(outputs["loss"])
        forward.why = (
            f"labels: the loss of {type(self.inner).__name__} is not one that a ring computes; "
            "omit them and compute one from the outputs, as ringray.sharded_cross_entropy does"
        )
        if logits.dim() == 2:
            expected = ForSequenceClassificationLoss(labels, logits, self.inner.config)
            forward.loss = "pooled" if self._same_loss(loss, float(expected)) else None
            return
        following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        sums = [float(per_token(logits, x, (x != IGNORED).sum())) for x in (labels, following)]
        router = float(forward.router_loss(outputs))
        gaps = [abs(loss - router - x) for x in sums]
        forward.shifted = gaps[1] < gaps[0]
        rest = loss - sums[forward.shifted]
        if self._same_loss(rest, router, loss):
            forward.loss = "tokens"
        if forward.shifted and (forward.loss or outputs.get("aux_loss") is not None):
            count = torch.tensor(3.0, dtype=torch.float32, device=self.device)
            try:
                own = self._call(
                    ids, labels=following, shift_labels=following, num_items_in_batch=count
                ).loss
            except TypeError:  # it takes no such arguments
                return
            if self._same_loss(float(own), float(per_token(logits, following, count)) + rest):
                forward.loss = "own"

    def _same_loss(self, got: float, want: float, scale: float | None = None) -> bool:
        return abs(got - want) <= self.allowed_loss * max(
            abs(want if scale is None else scale), 0.01
        )

    def _compare(self, ids: Tensor, want: Any, labels: Tensor | None) -> None:
        """Finds the rule for positions with which the ring agrees."""
        pad = padding_token(self.inner)
        got, error, where = None, 0.0, ""
        for begin in (0,) if pad is None else (0, pad + 1):
            self.forward.begin = begin
            got = self._call_on_ring(ids, labels, None)
            error, where = self._error(got, want)
            if error <= self.allowed:
                break
        else:
            raise ValueError(self._differs(error, where))
        if labels is not None:
            parts = self._gathered(got["loss"].detach().double())
            if not self._same_loss(float(sum(parts)), float(want["loss"])):
                self.forward.loss = None

    def _compare_last(self, ids: Tensor) -> None:
        """Compares at the largest positions of the batch, on which a RoPE may depend."""
        end = max(self.last + 1, ids.shape[1])
        begin = end - ids.shape[1]
        positions = torch.arange(begin, end, dtype=torch.int64, device=self.device)[None]
        if self.positions > 1:  # unlike each other, so that none stands for another
            positions = torch.stack([positions // (i + 1) for i in range(self.positions)])
        with eager(self.model):
            want = self._call(ids, position_ids=positions)
        error, where = self._error(self._call_on_ring(ids, None, positions), want)
        if error > self.allowed:
            raise ValueError(self._differs(error, where) + f", at positions up to {self.last}")

    def _call_on_ring(self, ids: Tensor, labels: Tensor | None, positions: Tensor | None) -> Any:
        batch = deal(self.forward, self.ring, ids, labels, positions)
        return self._call(batch.pop("input_ids"), **batch)

    def _error(self, got: Any, want: Any, *, dealt: bool = True) -> tuple[float, str]:
        """Returns the largest relative error of an output on any rank, and that output's name.
        ``dealt``: outputs per token are shards."""
        worst, where = 0.0, ""
        for name, x in float_outputs(want):
            y = got[name]
            if dealt and name not in self.forward.pooled:
                y = unshard(y, dim=1, **self.ring.layout)
            error = float((y.double() - x.double()).norm() / x.double().norm().clamp(min=1e-12))
            if not error <= worst:  # NaN too
                worst, where = error if error == error else float("inf"), name
        worst_of = torch.tensor([worst], dtype=torch.float64, device=self.device)
        return max(map(float, self._gathered(worst_of))), where

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """Returns the ``x`` of all ranks."""
        parts = [torch.empty_like(x) for _ in range(self.comm.world_size)]
        agree(self.comm, AgreedCall("check of a model", model=type(self.inner).__name__))
        self.comm.gather(parts, x, "check of a model")
        return parts

    def compare_step(self, got: Tensor, want: Tensor) -> None:
        """Compares the logits of a step with a cache, the same tokens on every rank."""
        outputs = ModelOutput(logits=got), ModelOutput(logits=want)
        error, where = self._error(*outputs, dealt=False)
        if error > self.allowed:
            raise ValueError(self._differs(error, where) + ", in steps with a cache")

    def _differs(self, error: float, where: str) -> str:
        return (
            f"model: {type(self.inner).__name__} computes other {where or 'outputs'} on a ring "
            f"than in one process (error {error:.1e} of {self.ring.seq_len} tokens); expected "
            "positions by position_ids, scores by the arguments of its attention layers, and the "
            "same weights on all ranks"
        )
