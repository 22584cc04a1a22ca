"""Log-probabilities, entropy and likeliest tokens of this rank's rows, for reinforcement learning
and distillation.

Rows need no other rank: results stay sharded as their rows are. Where the *vocabulary* is sharded
too (tensor parallelism), each rank of that group makes three numbers a row of its own columns, or
its k likeliest tokens, and the ranks gather these; logits are never gathered.

Shape legend: B batch, R rows of one shard, V vocabulary of this rank, T ranks of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.call import whole
from ringray.attention.compile import operator
from ringray.attention.sharding import mistaken, refuse
from ringray.base.units import plain
from ringray.comm.ring import (
    Comm,
    RingGroup,
    connect,
    connect_named,
    name_of,
    place_in,
)
from ringray.nn.loss import by_rows, logits_of, mistake, mistake_of_rows


def token_log_probs(
    x: Tensor,
    labels: Tensor,
    *,
    head: nn.Module | None = None,
    rows: int | None = 1024,
    temperature: float = 1.0,
    ignore_index: int = -100,
    vocab_group: RingGroup = None,
) -> Tensor:
    """Returns the log-probability of each label: log softmax(logits / temperature)[label].

    Labels are those of ``sharded_cross_entropy``: shifted before sharding (``next_token_labels``),
    or by ``ringray.shift``.

    Args:
        x: logits (..., R, V) of this rank's rows, floating point, finite or -inf; with ``head`` its
            inputs (B, R, H).
        labels: (..., R) integers, this rank's rows.
        head: a module that makes logits (B, R', V) of R' of the rows, which exist only at a time.
        rows: of x at once, computed again in the backward pass; None: all, and they are kept.
        temperature: divides the logits.
        ignore_index: label of rows without a log-probability.
        vocab_group: the ranks that hold the vocabulary's columns, rank t the t-th of T equal parts;
            all of them call with the same rows and use the result alike, so that each one's
            gradient is of its own columns. None: logits have all columns.

    Returns:
        (..., R) in fp32, in fp64 for fp64 logits; 0 where labels are ignored.

    Raises:
        ValueError: shapes, dtypes, settings or labels that do not fit; on every rank of
            ``vocab_group``, also where its ranks disagree. On a GPU, which no rank waits for,
            labels outside of the vocabulary, or other ones than those of its ranks, fail in an
            assertion.
    """
    asked = _Asked("token_log_probs", head, rows, temperature, vocab_group, plain(ignore_index))

    def own(logits: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
        scaled, highest = _scaled(logits, temperature)
        columns = wanted.long() - asked.place * logits.shape[-1]
        elsewhere = (columns < 0) | (columns >= logits.shape[-1])  # ignored, or of another rank
        picked = scaled.gather(-1, columns.masked_fill(elsewhere, 0)[..., None])[..., 0]
        total = (scaled - highest[..., None]).exp().sum(-1)
        return torch.stack([highest, total, picked.masked_fill(elsewhere, 0)], -1), _size(logits)

    def combined(sums: Tensor) -> Tensor:
        most, total, _ = _whole(sums)
        # The largest logit first: a log-probability near 0 keeps its digits.
        log_probs = sums[..., 2].sum(0) - most - total.log()
        return log_probs.masked_fill(labels.long() == asked.ignore_index, 0)

    return cast("Tensor", asked.answer(own, combined, x, labels))


def token_entropy(
    x: Tensor,
    *,
    head: nn.Module | None = None,
    rows: int | None = 1024,
    temperature: float = 1.0,
    vocab_group: RingGroup = None,
) -> Tensor:
    """Returns the entropy of softmax(logits / temperature) of each row, in nats, (..., R).

    Arguments, dtypes and errors are those of ``token_log_probs``.
    """
    asked = _Asked("token_entropy", head, rows, temperature, vocab_group)

    def own(logits: Tensor) -> tuple[Tensor, ...]:
        scaled, highest = _scaled(logits, temperature)
        below = scaled - highest[..., None]
        weights = below.exp()
        # A logit of -inf adds 0, which 0 * -inf is not.
        weighted = (weights * below.clamp(min=torch.finfo(below.dtype).min)).sum(-1)
        return torch.stack([highest, weights.sum(-1), weighted], -1), _size(logits)

    def combined(sums: Tensor) -> Tensor:
        most, total, factors = _whole(sums)
        below = sums[..., 0] - most
        weighted = (factors * (sums[..., 2] + sums[..., 1] * below)).sum(0)
        return total.log() - weighted / total

    return cast("Tensor", asked.answer(own, combined, x))


def token_top_k(
    x: Tensor,
    k: int,
    *,
    head: nn.Module | None = None,
    rows: int | None = 1024,
    temperature: float = 1.0,
    vocab_group: RingGroup = None,
) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of the ``k`` likeliest tokens of each row, falling, and these
    tokens: (..., R, k) each, the latter int64.

    ``k``: at most the tokens of the whole vocabulary. Other arguments, dtypes and errors are those
    of ``token_log_probs``.
    """
    asked = _Asked("token_top_k", head, rows, temperature, vocab_group, k=plain(k))

    def own(logits: Tensor) -> tuple[Tensor, ...]:
        scaled, highest = _scaled(logits, temperature)
        values, tokens = scaled.topk(min(asked.k, logits.shape[-1]))
        total = (scaled - highest[..., None]).exp().sum(-1)
        sums = torch.cat([highest[..., None], total[..., None], values], -1)
        return sums, _size(logits), tokens + asked.place * logits.shape[-1]

    def combined(sums: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        most, total, _ = _whole(sums)
        # Each rank's candidates, next to each other.
        values, tokens = (every.movedim(0, -2).flatten(-2) for every in (sums[..., 2:], tokens))
        values, places = values.topk(asked.k)
        return values - (most + total.log())[..., None], tokens.gather(-1, places)

    likeliest = asked.answer(own, combined, x)
    return (likeliest, likeliest) if isinstance(likeliest, Tensor) else likeliest


def _scaled(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns logits / temperature in fp32 or fp64, and the largest of each row, a constant."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scaled = wide / temperature
    # Finite, so that a row of -inf alone, of one rank's columns, does not become NaN.
    return scaled, scaled.detach().amax(-1).clamp(min=torch.finfo(scaled.dtype).min)


def _size(logits: Tensor) -> Tensor:
    """Returns the number of columns: a checkpoint returns tensors. No rank waits for a device."""
    return torch.full((), logits.shape[-1], dtype=torch.int64, device="cpu")


def _whole(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the largest logit of all ranks' columns, the sum of exp(logit - largest), and the
    factor of each rank's sum in it; ``sums`` (T, ..., 2 or more): of each rank, by its own largest.
    """
    most = sums[..., 0].detach().amax(0)
    factors = (sums[..., 0] - most).exp()
    return most, (sums[..., 1] * factors).sum(0), factors


@dataclass(frozen=True)
class _Asked:
    """The arguments of a call that are no tensors; the ranks of ``group`` have them in common."""

    function: str
    head: nn.Module | None
    rows: int | None
    temperature: float
    group: RingGroup
    ignore_index: int = -100
    k: int = 1

    @property
    def ring(self) -> tuple[str | None, int, int]:
        """Returns the name of the vocabulary's group, this rank's place in it and its size."""
        return (None, 0, 1) if self.group is None else (name_of(self.group), *place_in(self.group))

    @property
    def place(self) -> int:
        """Returns this rank's place."""
        return self.ring[1]

    def answer(
        self,
        own: Callable[..., tuple[Tensor, ...]],
        combined: Callable[..., Any],
        x: Tensor,
        *labels: Tensor,
    ) -> Any:
        """Returns ``combined`` of what ``own`` makes of some rows' logits, from all ranks."""
        name, place, ranks = self.ring
        alone, traced = name is None, torch.compiler.is_compiling()
        comm = Comm(None) if alone else connect(self.group)
        with nullcontext() if traced else refusing(comm, once=True):
            if why := self._mistake(x, *labels):
                tensors = [value for value in (x, *labels) if isinstance(value, Tensor)]
                if not traced or alone:
                    raise ValueError(mistaken(why, tensors))
                # Others may run theirs already.
                return refuse(why, [tensor.detach() for tensor in tensors], name, ranks)

            if not traced:  # tensors without memory would pass by the operator
                comm.check(x.device, staged=False, collective=True)

            def of_rows(some: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
                return own(some if self.head is None else logits_of(self.head, some), *wanted)

            parts = by_rows(of_rows, self.rows, x, *labels)
            sums, (size, *_), *others = zip(*parts, strict=True)
            settings = name, ranks, place, self.function, float(self.temperature), self.ignore_index
            every = [torch.cat(pieces, x.dim() - 2) for pieces in (sums, *others)]
            checked = [labels[0] if labels else None, size, self.k, *settings]
            return combined(*(_gathered(tensor, *checked) for tensor in every))

    def _mistake(self, x: Any, *labels: Any) -> str | None:
        name, heat = "logits" if self.head is None else "x", self.temperature
        if not isinstance(heat, int | float) or not 0 < heat < math.inf:
            return f"temperature: got {heat!r}, expected a positive number"
        if not whole(self.k, 1):
            return f"k: got {self.k!r}, expected an integer of at least 1"
        if self.group is not None and isinstance(x, Tensor) and is_batchedtensor(x):
            return f"{name}: got a tensor of torch.vmap, expected a call outside of it"
        if labels:
            return mistake(x, name, labels[0], self.ignore_index)
        return mistake_of_rows(x, name)


# An operator, opaque to torch.compile; see ``ringray.attention.compile``.


@operator(
    "of_vocabulary(Tensor own, Tensor? labels, Tensor size, SymInt k, str? group, int ranks, "
    "int place, str function, float temperature, SymInt ignore_index) -> Tensor",
    fake=lambda own, _, __, ___, ____, ranks, *_____: own.new_empty((ranks, *own.shape)),
)
def _gathered(own: Tensor, labels: Tensor | None, size: Tensor, k: int, *settings: Any) -> Tensor:
    """Returns the numbers of all ranks of the vocabulary, (T, ...), from checked columns."""
    group, ranks, _, function, temperature, ignore_index = settings
    comm, columns = Comm(None) if group is None else connect_named(group, ranks), int(size)
    with refusing(comm):
        comm.check(own.device, staged=False, collective=True)
        wrong = None
        if labels is not None:
            labels = labels.long()  # uint8 does not compare with negative numbers
            wrong = (labels != ignore_index) & ((labels < 0) | (labels >= columns * ranks))
            if labels.device.type == "cpu" and wrong.any():
                raise ValueError(
                    f"labels: got {int(labels[wrong][0])}, expected 0 to {columns * ranks - 1}, "
                    f"the tokens of the logits, or ignore_index {ignore_index}"
                )
        if k > columns * ranks:
            raise ValueError(f"k: got {k}, expected at most {columns * ranks}, all tokens")
        every = own.new_empty((ranks, *own.shape))
        values = {"temperature": temperature, "ignore_index": ignore_index, "k": k}
        values |= {"shape": tuple(own.shape), "columns": columns, "dtype": own.dtype}
        agree(comm, AgreedCall(function, **values))
    comm.gather([*every.unbind(0)], own.contiguous(), function)
    if labels is not None and wrong is not None and ranks > 1:
        # A sum that wraps; any two places have different factors, and odd ones lose no bit.
        factors = torch.arange(1, 2 * labels.numel(), 2, dtype=torch.int64, device=labels.device)
        sums = labels.new_empty(ranks)
        comm.gather([*sums.unbind()], (labels.flatten() * factors).sum(), function)
        differ = (sums != sums[0]).any()
        if labels.device.type == "cuda":  # which is not waited for
            right = ~(wrong.any() | differ)
            torch._assert_async(right, f"{function}: labels of no token, or not the same on ranks")
        elif differ:
            raise ValueError("labels: ranks of vocab_group got different ones, expected the same")
    return every


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place = inputs[6]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Every rank uses the result alike, so each knows its own part of the gradient.
    return grad[ctx.place], *[None] * 9


_gathered.register_autograd(_backward, setup_context=_setup)
