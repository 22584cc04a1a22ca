"""``shard_batch``: this rank's part of a batch that every rank holds.

Shape legend: B batch, S global length, R rows of one shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.call import several
from ringray.attention.documents import document_boundaries
from ringray.attention.other_names import answering_other_names
from ringray.comm.ring import RingGroup, connect
from ringray.models.huggingface.batch import NO_TOKEN, deal, positions_in_documents
from ringray.models.huggingface.probe import check
from ringray.models.huggingface.ring import IGNORED, Ring, digest, said, transformers_model
from ringray.partition import Partitioning
from ringray.traffic.deal import resolved
from ringray.traffic.mask import Mask
from ringray_kernels.config import Blocks


@answering_other_names
def shard_batch(
    model: nn.Module,
    input_ids: Tensor | None = None,
    *,
    inputs_embeds: Tensor | None = None,
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
        input_ids: (B, S) integers, the same on every rank of ``group``; None with
            ``inputs_embeds``.
        inputs_embeds: (B, S, H) in place of tokens, of every rank, with features of images merged
            before. Its gradient is that of this rank's rows and 0 elsewhere. Ranks compare shapes,
            not values, which encoders may round differently.
        labels: (B, S) integers, not shifted, -100 where ignored, as transformers takes them, or
            one of each batch row for a head that pools a token; None for no loss. The last token of
            a document predicts nothing.
        position_ids: (S,), (1, S) or (B, S) integers; None counts in each document from where the
            model does, 0 mostly. Of models with several positions of a token (mRoPE) also
            (3, B, S), or (4, B, S), whose first row is of text, as transformers takes them.
        cu_seqlens: boundaries of packed documents, 1-D integers from 0 to S, not decreasing, shared
            by all batch rows, or 2-D with a row for each. None finds them as transformers does: a
            document begins where ``position_ids`` do not increase by 1, those of text alone.
        attention_mask: (B, S); accepted where it masks nothing.
        group, partition, transport, backend, blocks: as in ``ringray.ring_attention``.
        gradients: reduction of parameter gradients after ``backward``. ``sum``: they are summed
            over the ring. ``mean``: a wrapper averages them, as DDP and FSDP do; the losses of all
            ranks then average to the loss of the batch.
        prefix: tokens at the beginning of each document that see each other in both directions, in
            every layer (prefix-LM): a number for all documents, or a list with one for each. The
            model itself has to leave them causal; labels are not changed.

    Returns:
        ``input_ids`` (B, R), or ``inputs_embeds`` (B, R, H), ``position_ids`` (..., R),
        ``use_cache`` False, ``ring``; with labels also
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
        tokens = _tokens(input_ids, inputs_embeds)
        options: dict[str, Any] = {"group": group, "partition": partition, "transport": transport}
        options |= {"backend": backend, "blocks": blocks, "gradients": gradients, "prefix": prefix}
        ring, positions = _ring(tokens, position_ids, cu_seqlens, attention_mask, **options)
        tensors = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        call: dict[str, Any] = {"model": type(inner).__name__, "batch": len(tokens)}
        call["inputs_embeds"] = None if inputs_embeds is None else said(inputs_embeds)
        call |= {"seq_len": ring.seq_len, **{name: digest(x) for name, x in tensors.items()}}
        call |= {"documents": ring.cu_seqlens, "partition": partition, "gradients": gradients}
        agree(comm, AgreedCall("shard_batch", **call))
        forward = check(model, ring, several_positions=positions.dim() > 2)
        own_positions = None if position_ids is None else positions
        return deal(forward, ring, tokens, labels, own_positions, inputs_embeds)


def _tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Returns the tokens (B, S); for embeddings numbers that stand for no token."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("input_ids: expected either input_ids or inputs_embeds")
    if inputs_embeds is None:
        assert input_ids is not None
        return input_ids
    if inputs_embeds.dim() != 3 or not inputs_embeds.is_floating_point():
        raise ValueError(f"inputs_embeds: got {said(inputs_embeds)}, expected numbers (B, S, H)")
    shape, device = inputs_embeds.shape[:2], inputs_embeds.device
    return torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device)


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
    """Returns the layout of a batch and its positions (..., B, S), from checked arguments."""
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
    of_mrope = [(rows, *input_ids.shape) for rows in (3, 4)]  # without or with that of text
    shapes = [(seq_len,), (1, seq_len), tuple(input_ids.shape)]
    if tuple(position_ids.shape) not in {*shapes, *of_mrope}:
        raise ValueError(
            f"position_ids: got {said(position_ids)}, expected integers of shape "
            f"{', '.join(map(str, shapes))}, or {' or '.join(map(str, of_mrope))}"
        )
    if position_ids.dim() < 3:
        position_ids = position_ids.expand_as(input_ids)
    of_text = position_ids if position_ids.dim() < 3 else None
    if len(position_ids) == 4 and of_text is None:
        of_text = position_ids[0]
    if cu_seqlens is None and of_text is not None:
        documents = _documents(of_text)
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
