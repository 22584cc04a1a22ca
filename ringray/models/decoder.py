"""``Decoder``: a Llama-style model whose sequence is sharded over a ring, built from ringray.nn.

    ids -> embedding -> layers x [norm, attention, norm, MLP] -> norm -> logits

Shape legend: B batch, S rows of one shard, H hidden, V vocabulary. Parameters are named as in
Llama checkpoints of Hugging Face, without ``model.``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast, get_args
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringray.comm.ring import RingGroup
from ringray.models.sizes import Kept, Model, Scores
from ringray.nn import ContextParallelAttention, keep_attention
from ringray.nn.loss import sharded_linear_cross_entropy


class WholeScores(ContextParallelAttention):
    """Attention that keeps the matrix of its scores, for comparisons: vanilla attention. It needs
    all rows on its rank."""

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, seq_len: int, cu_seqlens: Tensor | None, *_: Any
    ) -> Tensor:
        rows = q.shape[2]
        if cu_seqlens is not None or rows < seq_len:
            raise ValueError("whole scores: expected one document, all of it on this rank")
        heads = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(heads, 1) for x in (k, v))
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return cast("Tensor", self.o_proj((weights @ v).transpose(1, 2).flatten(2)))


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020). ``rows``: computed at once, and again in the backward pass, which
    bounds the memory of its activations (blockwise feed-forward, Liu and Abbeel 2023); None: all,
    kept."""

    def __init__(self, hidden: int, intermediate: int, rows: int | None, **like: Any) -> None:
        super().__init__()
        self.rows = rows
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, **like)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, **like)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, S, H)."""
        if self.rows is None or x.shape[1] <= self.rows:
            return self._rows(x)
        return torch.cat([again(self._rows, part) for part in x.split(self.rows, 1)], 1)

    def _rows(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


def again(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Tensor:
    """Computes ``function``, which keeps its inputs alone and is computed again in backward."""
    return cast("Tensor", checkpoint(function, *inputs, use_reentrant=False, **options))


class Layer(nn.Module):
    """One layer of a decoder, with a norm before each part. ``kept``: for its backward pass."""

    def __init__(
        self,
        kept: Kept,
        norms: list[nn.RMSNorm],
        attention: ContextParallelAttention,
        mlp: GatedMLP,
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = norms[0], attention
        self.post_attention_layernorm, self.mlp = norms[1], mlp
        self.kept = kept

    def forward(self, x: Tensor, **where: Any) -> Tensor:
        """Returns the stream behind this layer, (B, S, H)."""
        if self.kept == "all" or not torch.is_grad_enabled():
            return self._layer(x, **where)
        keeping = {"context_fn": keep_attention} if self.kept == "attention" else {}
        return again(self._layer, x, **keeping, **where)

    def _layer(self, x: Tensor, **where: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **where)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """A causal language model on this rank's rows.

    Args:
        model: its sizes (``ringray.models.sizes``); the MLP is gated.
        scores: ``whole`` keeps the matrix of all scores, of one rank only.
        mlp_rows: rows of the MLP at once, computed again in backward; None: all of them, kept.
        loss_rows: rows of logits at once, computed again in backward; None: all of them, kept.
        kept: what a layer keeps for its backward pass.
        eps: of the norms.
        first, last: numbers of the layers of a pipeline's stage, ``last`` exclusive. The first
            stage embeds, the last one has the final norm and the logits.
        device, dtype: of the parameters.
        options: keywords of ``ContextParallelAttention``: group, partition, transport, rope_theta.

    Raises:
        ValueError: sizes or options that do not fit.
    """

    def __init__(
        self,
        model: Model,
        *,
        scores: Scores = "blockwise",
        mlp_rows: int | None = None,
        loss_rows: int | None = 1024,
        kept: Kept = "all",
        eps: float = 1e-5,
        first: int = 0,
        last: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check(model, scores, kept, mlp_rows, loss_rows)
        last = model.layers if last is None else last
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.size, self.loss_rows = model, loss_rows
        self.embed_tokens = nn.Embedding(model.vocab, model.hidden, **like) if first == 0 else None
        whole, heads = scores == "whole", (model.hidden, model.heads)
        options |= {"num_kv_heads": model.kv_heads, "head_dim": model.head_dim, **like}

        def layer() -> Layer:
            norms = [nn.RMSNorm(model.hidden, eps, **like) for _ in range(2)]
            attention = (WholeScores if whole else ContextParallelAttention)(*heads, **options)
            mlp = GatedMLP(model.hidden, model.intermediate, mlp_rows, **like)
            return Layer(kept, norms, attention, mlp)

        # By number, so that stages and whole models have the same names.
        self.layers = nn.ModuleDict({str(i): layer() for i in range(first, last)})
        ends = last == model.layers
        self.norm = nn.RMSNorm(model.hidden, eps, **like) if ends else None
        self.lm_head = nn.Linear(model.hidden, model.vocab, bias=False, **like) if ends else None
        if ends and model.tied:
            if self.embed_tokens is None:
                raise ValueError(f"{model.name}: tied embeddings do not fit a pipeline")
            cast("nn.Linear", self.lm_head).weight = self.embed_tokens.weight
        self.reset()

    def reset(self, seed: int = 0) -> None:
        """Draws new weights: normal with deviation sqrt(2/5H) (Nguyen and Salazar 2019), in layers'
        last products less by the root of twice their number (GPT-2). Each depends on its name and
        the seed alone, so the stages of a pipeline draw those of the whole model."""
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                nn.init.ones_(weight)
                continue
            deviation = math.sqrt(0.4 / self.size.hidden)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation /= math.sqrt(2 * self.size.layers)
            draw = torch.Generator(weight.device).manual_seed(crc32(name.encode(), seed))
            nn.init.normal_(weight, std=deviation, generator=draw)

    def forward(
        self,
        x: Tensor,
        *,
        labels: Tensor | None = None,
        shards: RingGroup = None,
        gradients: Literal["sum", "mean"] = "sum",
        **where: Any,
    ) -> Tensor:
        """Returns the stream behind this stage's layers, (B, S, H); in the last stage logits,
        (B, S, V), or with ``labels`` the loss per token, whose logits never exist all at once.

        Args:
            x: (B, S) token ids of this rank's rows in the first stage, later (B, S, H).
            labels: (B, S), this rank's rows; -100 where there is no loss.
            shards, gradients: all ranks that hold tokens and the reduction of gradients, as
                ``group`` and ``gradients`` of ``sharded_cross_entropy``.
            where: ``seq_len``, ``cu_seqlens``, ``partition`` as in ``ContextParallelAttention``.
        """
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x, **where)
        if self.norm is None or self.lm_head is None:
            return x
        x = self.norm(x)
        if labels is None:
            return cast("Tensor", self.lm_head(x))
        return sharded_linear_cross_entropy(
            x, self.lm_head, labels, rows=self.loss_rows, group=shards, gradients=gradients
        )


def _check(
    model: Model, scores: str, kept: str, mlp_rows: int | None, loss_rows: int | None
) -> None:
    if not model.gated:
        raise ValueError(f"{model.name}: expected a model with a gated MLP")
    for name, value, valid in (("scores", scores, Scores), ("kept", kept, Kept)):
        if value not in get_args(valid):
            raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(get_args(valid))}")
    for name, rows in (("mlp_rows", mlp_rows), ("loss_rows", loss_rows)):
        if rows is not None and rows < 1:
            raise ValueError(f"{name}: got {rows}, expected at least 1, or None")
