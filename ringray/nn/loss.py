"""The loss of a language model whose sequence is sharded over a ring, and its labels.

Shape legend: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.call import whole
from ringray.attention.compile import operator
from ringray.attention.documents import INTEGERS, document_boundaries
from ringray.attention.sharding import holds, mistaken, refuse
from ringray.base.units import plain
from ringray.comm.ring import RingGroup, connect, connect_named, name_of, place_in
from ringray.traffic.mask import Mask
from ringray_kernels.checks import not_plain

_Sums = tuple[Tensor, Tensor]
_Asked = tuple[str, RingGroup, int, str]  # function, group and settings


def next_token_labels(
    input_ids: Tensor, cu_seqlens: Any = None, *, ignore_index: int = -100
) -> Tensor:
    """Returns labels of a causal language model: the successor of each token within its document.

    Call it on the *whole* sequence, before sharding: the successor of a shard's last row is on
    another rank.

    Args:
        input_ids: (B, sequence), integers.
        cu_seqlens: boundaries of packed documents, as in ``ring_attention``.
        ignore_index: label of each document's last token, which has no successor.

    Returns:
        (B, sequence), int64.

    Raises:
        ValueError: ids that are no integers of two dimensions, or boundaries that do not fit.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in INTEGERS:
        what = mistaken("{}", [input_ids]) if isinstance(input_ids, Tensor) else repr(input_ids)
        raise ValueError(f"input_ids: got {what}, expected integers (B, sequence)")
    labels = torch.full_like(input_ids, ignore_index, dtype=torch.int64)
    labels[:, :-1] = input_ids[:, 1:]
    documents = document_boundaries(cu_seqlens, len(input_ids))
    if documents is not None:
        Mask(labels.shape[1], documents=documents)  # checks them
        ends = torch.tensor(documents, dtype=torch.int64, device=labels.device)
        for row, own in zip(labels, ends.expand(len(labels), -1), strict=True):
            row[own[own > 0] - 1] = ignore_index
    return labels


def sharded_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: RingGroup = None,
    ignore_index: int = -100,
    gradients: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Returns cross entropy per token over all ranks of ``group``: sum of all losses / their
    number.

    A mean of the ranks' means would weigh tokens by the number of labels on their rank; this is the
    loss of one process that holds all rows, wherever labels are ignored. Labels are shifted
    *before* sharding (``next_token_labels``) and padded with ``ignore_index``:
    ``ringray.shard(labels, dim=1, pad_value=-100)``.

    Args:
        logits: (..., V) floating point, this rank's rows, finite; losses are computed in fp32.
        labels: (...) integers of any dtype that holds ``ignore_index`` and the tokens, this rank's
            rows. Others are refused on every rank before anything is sent; on a GPU, which no rank
            waits for, labels outside of the vocabulary fail in an assertion on every rank.
        group: all ranks that hold tokens of this step. None is the default group; pass the ring's
            or, for one mean over data-parallel replicas as well, all ranks of ring x replicas.
        ignore_index: label of tokens without a loss: prompts, document ends, padding.
        gradients: reduction of parameter gradients afterwards. ``sum``: each rank gets its part of
            the gradient, and the parts are summed over ``group``. ``mean``: wrappers that average
            over ``group``, as DDP and FSDP do, get the same result.

    Returns:
        fp32 scalar, bitwise equal on every rank; 0 with gradients 0 where every label of every rank
        is ignored.

    Raises:
        ValueError: on every rank, shapes, dtypes or labels that do not fit, an unknown
            ``gradients``, or ranks that disagree about settings.
    """
    own = partial(_summed, logits, labels, ignore_index)
    asked = "sharded_cross_entropy", group, plain(ignore_index), gradients
    return _per_token(own, logits, "logits", labels, asked)


def sharded_linear_cross_entropy(
    x: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    rows: int | None = 1024,
    group: RingGroup = None,
    ignore_index: int = -100,
    gradients: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Returns ``sharded_cross_entropy`` of the logits ``head(x)``, of which only some rows exist at
    a time: they are computed again in the backward pass.

    Args:
        x: (B, S, H), this rank's rows.
        head: a module that makes logits (B, S', V) of S' of the rows.
        labels: (B, S) integers, this rank's rows.
        rows: of logits at once; None: all, and they are kept.
        group, ignore_index, gradients: as in ``sharded_cross_entropy``, and so are the errors.
    """

    def of_rows(some: Tensor, wanted: Tensor) -> _Sums:
        return _summed(logits_of(head, some), wanted, ignore_index)

    def own() -> _Sums:
        losses, (size, *_) = zip(*by_rows(of_rows, rows, x, labels), strict=True)
        return torch.stack(losses).sum(), size

    asked = "sharded_linear_cross_entropy", group, plain(ignore_index), gradients
    return _per_token(own, x, "x", labels, asked)


def logits_of(head: Any, x: Tensor) -> Tensor:
    """Returns what ``head`` makes of rows (B, S', H), checked; raises ValueError."""
    if not callable(head):
        raise ValueError(f"head: got {type(head).__name__}, expected a module that makes logits")
    features = getattr(head, "in_features", x.shape[-1])
    if features != x.shape[-1]:
        raise ValueError(f"head: got one of {features} features, expected {x.shape[-1]}, as x has")
    logits = head(x)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != x.shape[:-1]:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"head: got {shape} from it, expected logits {(*x.shape[:-1], 'V')}")
    return logits


def by_rows(function: Callable[..., Any], rows: int | None, *tensors: Tensor) -> list[Any]:
    """Returns the results of ``function`` for ``rows`` rows of tensors at a time, which it computes
    again in the backward pass; None: for all, which are kept. The first tensor is (..., R, H)."""
    if rows is not None and not whole(rows, 1):
        raise ValueError(f"rows: got {rows!r}, expected None or an integer of at least 1")
    dim = tensors[0].dim() - 2
    if rows is None or rows >= tensors[0].shape[dim]:
        return [function(*tensors)]
    parts = zip(*(tensor.split(rows, dim) for tensor in tensors), strict=True)
    return [checkpoint(function, *part, use_reentrant=False) for part in parts]


def mistake_of_rows(x: Any, name: str) -> str | None:
    """Returns the mistake in ``x``, rows that ``name`` says what they are, with {0} for it."""
    if why := _no_tensor(x, name):
        return why
    if not x.is_floating_point() or (x.dim() != 3 if name == "x" else x.dim() < 2):
        shape = "(B, S, H)" if name == "x" else "(..., V)"
        return f"{name}: got {{0}}, expected floating point {shape}"
    return None


def _no_tensor(value: Any, name: str) -> str | None:
    if not isinstance(value, Tensor):
        return f"{name}: got {type(value).__name__}, expected a tensor"
    if not torch.compiler.is_compiling() and (reason := not_plain(value)):
        return f"{name}: got {reason}"
    return None


def mistake(
    x: Any, name: str, labels: Any, ignore_index: int, gradients: str = "sum"
) -> str | None:
    """Returns the mistake in arguments, with {0} for ``x``, {1} for ``labels``; or None."""
    if why := mistake_of_rows(x, name) or _no_tensor(labels, "labels"):
        return why
    if gradients not in ("sum", "mean"):
        return f"gradients: got {gradients!r}, expected 'sum' or 'mean'"
    if labels.dtype not in INTEGERS or labels.shape != x.shape[:-1]:
        return f"labels: got {{1}}, expected integers of all but the last dimension of {name} {{0}}"
    if type(ignore_index) is not int or not holds(labels.dtype, ignore_index):
        wide = "an integer that labels {1} can hold, or labels of another dtype (labels.long())"
        return f"ignore_index: got {ignore_index!r}, expected {wide}"
    return None


def _summed(logits: Tensor, labels: Tensor, ignore_index: int) -> _Sums:
    """Returns the sum of the losses of rows, in fp32, without labels outside the vocabulary, and
    the size of that, int64."""
    flat, wanted = logits.flatten(0, -2).float(), labels.flatten().long()
    wrong = (wanted < 0) | (wanted >= flat.shape[-1])  # the operator refuses them
    wanted = wanted.masked_fill(wrong, ignore_index)
    own = F.cross_entropy(flat, wanted, ignore_index=ignore_index, reduction="sum")
    return own, wanted.new_full((), flat.shape[-1])


def _per_token(
    own: Callable[[], _Sums], x: Tensor, name: str, labels: Tensor, asked: _Asked
) -> Tensor:
    """Returns the sum of losses over the group over the number of labels; ``x``: what the rows
    have, ``own``: computes this rank's part."""
    function, group, ignore_index, gradients = asked
    ring, traced = (name_of(group), place_in(group)[1]), torch.compiler.is_compiling()
    with nullcontext() if traced else refusing(connect(group), once=True):
        if why := mistake(x, name, labels, ignore_index, gradients):
            tensors = [value for value in (x, labels) if isinstance(value, Tensor)]
            if not traced:
                raise ValueError(mistaken(why, tensors))
            tensors = [tensor.detach() for tensor in tensors]
            return cast("Tensor", refuse(why, tensors, *ring))  # others may run theirs already
        settings = function, x.shape[-1], str(x.dtype), ignore_index, gradients
        average = _global_mean_op if traced else _GlobalMean.apply
        return cast("Tensor", average(*own(), labels, *ring, *settings)[0])


def _global_mean(
    own: Tensor, size: Tensor, labels: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Returns the sum / the count over all ranks, and the gradient's weight of ``own``. ``size``:
    of the vocabulary; the others are those of the operator below."""
    group, ranks, function, features, dtype, ignore_index, gradients = arguments
    comm = connect_named(group, ranks)
    with refusing(comm):
        comm.check(own.device, staged=False, collective=True)
        labels = labels.long()  # uint8 does not compare with negative numbers
        counted = labels != ignore_index
        wrong = counted & ((labels < 0) | (labels >= size))
        if labels.device.type == "cpu" and wrong.any():
            raise ValueError(
                f"labels: got {int(labels[wrong][0])}, expected 0 to {int(size) - 1}, the tokens "
                f"of the logits, or ignore_index {ignore_index}"
            )
        # fp64 counts tokens exactly, fp32 up to 2 ** 24.
        totals = torch.stack([own.double(), counted.sum().double(), wrong.sum().double()])
        settings = {"ignore_index": ignore_index, "gradients": gradients}
        agree(comm, AgreedCall(function, features=features, dtype=dtype, **settings))
    comm.sum(totals, function)
    if labels.device.type == "cuda":  # which is not waited for; all ranks have the error
        torch._assert_async(totals[2] == 0, f"{function}: labels outside of the vocabulary")
    number = totals[1].clamp(min=1)
    factor = ranks if gradients == "mean" else 1
    return (totals[0] / number).float(), (factor / number).float()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return grad * ctx.saved_tensors[0], *[None] * 9


class _GlobalMean(torch.autograd.Function):
    """``_global_mean`` with its gradient, for eager calls, which no operator delays."""

    forward = staticmethod(_global_mean)
    setup_context = staticmethod(_setup)
    backward = staticmethod(_backward)


# An operator, opaque to torch.compile; see ``ringray.attention.compile``.
_global_mean_op = operator(
    "global_mean(Tensor own, Tensor size, Tensor labels, str? group, int ranks, str function, "
    "SymInt features, str dtype, SymInt ignore_index, str gradients) "
    "-> (Tensor loss, Tensor weight)",
    fake=lambda own, *_: (own.new_empty(()), own.new_empty(())),
)(_global_mean)
_global_mean_op.register_autograd(_backward, setup_context=_setup)
