"""``shard_batch``: this rank's part of a batch that every rank holds.

Shape legend: B batch, S global length, R rows of one shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.call import several
from ringray.attention.documents import document_boundaries
from ringray.attention.other_names import answering_other_names
from ringray.comm.ring import RingGroup, connect
from ringray.models.huggingface.batch import deal, positions_in_documents
from ringray.models.huggingface.probe import check
from ringray.models.huggingface.ring import IGNORED, Ring, digest, said, transformers_model
from ringray.partition import Partitioning
from ringray.traffic.deal import resolved
from ringray.traffic.mask import Mask
from ringray_kernels.config import Blocks


@answering_other_names
def shard_batch(
    model: nn.Module,
    input_ids: Tensor,
    *,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    group: RingGroup = None,
    partition: Partitioning = partitions.DEFAULT,
    gradients: Literal["sum", "mean"] = "sum",
    transport: str = transports.DEFAULT,
    backend: str = "auto",
    blocks: Blocks | int | None = None,
    prefix: int | Sequence[int] | None = None,
) -> dict[str, Any]:
    """Returns this rank's part of a batch that every rank holds: arguments of the model's forward.
    All ranks call it together.

    Labels are shifted here, before dealing: a shard does not hold the next token of each of its
    rows. The model's own loss is then this rank's part of the loss per token of the whole batch;
    the parts of all ranks sum to it.

    Args:
        model: the transformers model that gets the batch, or DDP around it. At the first batch it
            runs on a few tokens, to be checked (``check``). Other attention implementations ignore
            ``ring`` and would attend within the shard.
        input_ids: (B, S) integers, the same on every rank of ``group``.
        labels: (B, S) integers, not shifted, -100 where ignored, as transformers takes them, or
            one of each batch row for a head that pools a token; None for no loss. The last token of
            a document predicts nothing.
        position_ids: (S,), (1, S) or (B, S) integers; None counts in each document from where the
            model does, 0 mostly.
        cu_seqlens: boundaries of packed documents, 1-D integers from 0 to S, not decreasing, shared
            by all batch rows, or 2-D with a row for each. None finds them as transformers does: a
            document begins where ``position_ids`` do not increase by 1.
        attention_mask: (B, S); accepted where it masks nothing.
        group, partition, transport, backend, blocks: as in ``ringray.ring_attention``.
        gradients: reduction of parameter gradients after ``backward``. ``sum``: they are summed
            over the ring. ``mean``: a wrapper averages them, as DDP and FSDP do; the losses of all
            ranks then average to the loss of the batch.
        prefix: tokens at the beginning of each document that see each other in both directions, in
            every layer (prefix-LM): a number for all documents, or a list with one for each. The
            model itself has to leave them causal; labels are not changed.

    Returns:
        ``input_ids`` and ``position_ids`` (B, R), ``use_cache`` False, ``ring``; with labels also
        ``labels`` (B, R), ``num_items_in_batch``, their count over the ring (divided by its size
        with ``mean``) and, where the model predicts the next token, ``shift_labels``, the same as
        ``labels`` (which transformers requires to compute a loss). Replace the count to average
        over replicas or accumulated batches as well. Padding rows hold token 0, or the padding
        token for a head that pools, at position 0 and are ignored by the loss.

    Raises:
        ValueError: on every rank, a model with another attention implementation (two models made
            from one config object share it), or that computes something else on a ring; ranks that
            hold different batches; shapes, boundaries or names that do not fit, or an
            ``attention_mask`` that masks something.
    """
    comm = connect(group)
    with refusing(comm):
        inner = transformers_model(model)
        options: dict[str, Any] = {"group": group, "partition": partition, "transport": transport}
        options |= {"backend": backend, "blocks": blocks, "gradients": gradients, "prefix": prefix}
        ring, positions = _ring(input_ids, position_ids, cu_seqlens, attention_mask, **options)
        tensors = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        call: dict[str, Any] = {"model": type(inner).__name__, "batch": len(input_ids)}
        call |= {"seq_len": ring.seq_len, **{name: digest(x) for name, x in tensors.items()}}
        call |= {"documents": ring.cu_seqlens, "partition": partition, "gradients": gradients}
        agree(comm, AgreedCall("shard_batch", **call))
        forward = check(model, ring)
        return deal(forward, ring, input_ids, labels, None if position_ids is None else positions)


def _ring(
    input_ids: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    attention_mask: Tensor | None,
    *,
    gradients: Literal["sum", "mean"],
    prefix: int | Sequence[int] | None,
    **options: Any,
) -> tuple[Ring, Tensor]:
    """Returns the layout of a batch and its positions (B, S), from checked arguments."""
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError(f"input_ids: got {said(input_ids)}, expected integers (B, S)")
    if gradients not in ("sum", "mean"):
        raise ValueError(f"gradients: got {gradients!r}, expected 'sum' or 'mean'")
    partitions.get(options["partition"])
    seq_len = input_ids.shape[1]
    if attention_mask is not None:
        _check_masks_nothing(attention_mask, input_ids)
    documents = document_boundaries(cu_seqlens, len(input_ids))
    Mask(seq_len, causal=True, window=None, documents=documents)  # checks the boundaries
    if position_ids is None:
        position_ids = positions_in_documents(Ring(seq_len, documents), input_ids.device)
    elif position_ids.shape not in {(seq_len,), (1, seq_len), input_ids.shape}:
        raise ValueError(
            f"position_ids: got {said(position_ids)}, expected integers of shape ({seq_len},), "
            f"(1, {seq_len}) or {tuple(input_ids.shape)}"
        )
    position_ids = position_ids.expand_as(input_ids)
    if cu_seqlens is None:
        documents = _documents(position_ids)
    last = int(position_ids.max())
    mask = Mask(seq_len, documents=documents, prefix=several(prefix))
    options["partition"] = resolved(
        options["partition"], mask, connect(options["group"]).world_size
    )
    options |= {"prefix": mask.prefixes if mask.prefix else None, "gradients": gradients}
    return Ring(seq_len, documents, last_position=last, **options), position_ids


def _check_masks_nothing(attention_mask: Tensor, input_ids: Tensor) -> None:
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: got {said(attention_mask)}, expected {tuple(input_ids.shape)}"
        )
    if not attention_mask.bool().all():
        raise ValueError(
            "attention_mask: it masks some tokens. Padding on the right needs no mask, as a causal "
            f"token sees nothing after it: omit the mask and set labels there to {IGNORED}. "
            "Instead of other padding, or without causality, pack documents: cu_seqlens"
        )


def _documents(position_ids: Tensor) -> Any:
    """Returns boundaries where positions (B, S) do not increase by 1, of each row if they differ;
    None if they always do."""
    begins, end = position_ids.diff(dim=1) != 1, position_ids.shape[1]
    if (begins == begins[:1]).all():
        begins = begins[:1]
    rows = [[0, *(row.nonzero().flatten() + 1).tolist(), end] for row in begins]
    documents: Any = document_boundaries(rows, len(rows))
    return documents if len(rows) > 1 else None if len(rows[0]) == 2 else documents[0]
