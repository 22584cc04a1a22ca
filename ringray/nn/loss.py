"""The loss of a language model whose sequence is sharded over a ring, and its labels.

Shape legend: B batch, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringray.attention.agreement import Averaging, agree
from ringray.attention.arguments import boundaries
from ringray.attention.compile import operator
from ringray.comm.ring import connect_named, name_of, place_in


def next_token_labels(
    input_ids: Tensor, cu_seqlens: Tensor | None = None, *, ignore_index: int = -100
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
    """
    labels = torch.full_like(input_ids, ignore_index, dtype=torch.int64)
    labels[:, :-1] = input_ids[:, 1:]
    if cu_seqlens is not None:
        ends = boundaries(cu_seqlens)
        if not isinstance(ends, Tensor):
            raise ValueError(f"cu_seqlens: got {ends!r}, expected integers in a tensor or a list")
        ends = ends.to(labels.device, torch.int64)
        for row, own in zip(labels, ends.expand(len(labels), -1), strict=True):
            row[own[own > 0] - 1] = ignore_index
    return labels


def sharded_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
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
        labels: (...) integers, this rank's rows.
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
        ValueError: shapes or dtypes that do not fit, or an unknown ``gradients``.
    """
    _check(logits, labels, gradients, "logits")
    own = _summed(logits, labels, ignore_index)
    return _per_token(own, labels, group, ignore_index, gradients)


def sharded_linear_cross_entropy(
    x: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    rows: int | None = 1024,
    group: dist.ProcessGroup | None = None,
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
    if x.dim() != 3:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (B, S, H)")
    _check(x, labels, gradients, "x")
    if rows is None or rows >= x.shape[1]:
        return sharded_cross_entropy(
            head(x), labels, group=group, ignore_index=ignore_index, gradients=gradients
        )

    def of_rows(some: Tensor, wanted: Tensor) -> Tensor:
        return _summed(head(some), wanted, ignore_index)

    parts = zip(x.split(rows, 1), labels.split(rows, 1), strict=True)
    sums = [checkpoint(of_rows, *part, use_reentrant=False) for part in parts]
    own = torch.stack(cast("list[Tensor]", sums)).sum()
    return _per_token(own, labels, group, ignore_index, gradients)


def _check(x: Tensor, labels: Tensor, gradients: str, name: str) -> None:
    if gradients not in ("sum", "mean"):
        raise ValueError(f"gradients: got {gradients!r}, expected 'sum' or 'mean'")
    if not x.is_floating_point() or x.dim() < 2:
        raise ValueError(
            f"{name}: got {x.dtype} of shape {tuple(x.shape)}, expected floating point (..., "
            f"{'V' if name == 'logits' else 'H'})"
        )
    if labels.is_floating_point() or labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels: got {labels.dtype} of shape {tuple(labels.shape)}, expected integers of "
            f"shape {tuple(x.shape[:-1])}, as {'the logits' if name == 'logits' else name}"
        )


def _summed(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Returns the sum of the losses of this rank's rows, in fp32."""
    flat = logits.flatten(0, -2).float()
    wanted = labels.flatten().long()
    return F.cross_entropy(flat, wanted, ignore_index=ignore_index, reduction="sum")


def _per_token(
    own: Tensor, labels: Tensor, group: dist.ProcessGroup | None, ignore_index: int, gradients: str
) -> Tensor:
    """Returns the sum of ``own`` over the group over the number of labels."""
    counted = (labels != ignore_index).sum()
    _, ranks = place_in(group)
    factor = ranks if gradients == "mean" else 1
    return cast("Tensor", _global_mean(own, counted, name_of(group), ranks, factor)[0])


# An operator, opaque to torch.compile; see ``ringray.attention.compile``.


@operator(
    "global_mean(Tensor own, Tensor counted, str? group, int ranks, SymInt factor) "
    "-> (Tensor loss, Tensor weight)",
    fake=lambda own, *_: (own.new_empty(()), own.new_empty(())),
)
def _global_mean(
    own: Tensor, counted: Tensor, group: str | None, ranks: int, factor: int
) -> tuple[Tensor, Tensor]:
    """Returns the sum / the count over all ranks, and the gradient's weight of ``own``."""
    # fp64 counts tokens exactly, fp32 up to 2 ** 24.
    totals = torch.stack([own.double(), counted.double()])
    comm = connect_named(group, ranks)
    agree(comm, Averaging(factor))
    comm.sum(totals, "sharded_cross_entropy")
    number = totals[1].clamp(min=1)
    return (totals[0] / number).float(), (factor / number).float()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return grad * ctx.saved_tensors[0], None, None, None, None


_global_mean.register_autograd(_backward, setup_context=_setup)
