"""Sizes of decoders by name or by numbers, their parameters and FLOPs.

The table is data (``sizes.yaml``). Imports numpy only, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ringray.base.errors import UserError, unknown
from ringray.traffic.geometry import total_visible
from ringray.traffic.mask import Mask

# What a layer of a decoder keeps for its backward pass, the rest is computed again: everything; its
# input and the result of attention, so the ring does not run again; its input.
Kept = Literal["all", "attention", "input"]
Scores = Literal["blockwise", "whole"]  # of attention; whole: their matrix is kept

TABLE = Path(__file__).with_name("sizes.yaml")


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder. ``gated``: its MLP has three matrices, else two. ``tied``: one matrix
    embeds and unembeds."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Returns the parameters of one layer, its two norms included."""
        return self.matrices + 2 * self.hidden

    @property
    def matrices(self) -> int:
        of_attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (of_attention + (2 + self.gated) * self.intermediate)

    @property
    def outer_parameters(self) -> int:
        """Returns the parameters of embedding, logits and the last norm."""
        return self.hidden * (self.vocab * (2 - self.tied) + 1)

    @property
    def parameters(self) -> int:
        """Returns all parameters."""
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def dense_flops(self) -> int:
        """Returns FLOPs of one layer's projections and MLP, per token, forward."""
        return 2 * self.matrices

    @property
    def logits_flops(self) -> int:
        """Returns FLOPs of the logits, per token, forward."""
        return 2 * self.hidden * self.vocab

    def forward_flops(self, context: int, *, causal: bool = True) -> int:
        """Returns FLOPs of one sequence, forward, by its visible pairs."""
        pairs = total_visible(Mask(context, causal))
        return context * self.token_flops + int(self.attention_flops(pairs))

    @property
    def token_flops(self) -> int:
        """Returns FLOPs of a token's products, forward, attention left out."""
        return self.layers * self.dense_flops + self.logits_flops

    def attention_flops(self, pairs: float) -> float:
        """Returns FLOPs of the attention of all layers to visible pairs, forward."""
        return self.layers * 4 * self.head_dim * self.heads * pairs

    def paper_flops(self, context: int) -> int:
        """Returns FLOPs of one sequence, forward, by the paper's formula (appendix C): 12 h² and
        all pairs, without logits."""
        h, s = self.hidden, context
        return self.layers * (24 * s * h**2 + 4 * s**2 * h)


@cache
def table() -> dict[str, Model]:
    """Returns the known models by name."""
    import yaml

    read: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {
        name: Model(name, **{"kv_heads": sizes["heads"], **sizes}) for name, sizes in read.items()
    }


def named(name: str | None, changed: Mapping[str, int | None]) -> Model:
    """Returns the model of the table with ``given`` sizes in place of its own, or one of sizes.

    A name may lack its family, then it is the latest with that size: ``8b``, ``70b``. Without a
    name, sizes that lack are as usual for layers, hidden and heads.

    Raises:
        UserError: unknown name, a size that lacks, heads that K/V heads do not divide.
    """
    sizes: dict[str, Any] = {key: value for key, value in changed.items() if value is not None}
    if name is None:
        lacking = [f"--{size}" for size in ("layers", "hidden", "heads") if size not in sizes]
        if lacking:
            raise UserError(f"MODEL: expected one of {', '.join(table())}, or {', '.join(lacking)}")
        hidden, heads = sizes["hidden"], sizes["heads"]
        usual = {"kv_heads": heads, "head_dim": max(1, hidden // heads), "vocab": 128256}
        usual["intermediate"] = -(-8 * hidden // (3 * 256)) * 256
        model = Model(**{"name": "these sizes", **usual, **sizes})
    else:
        folded = name.casefold()
        short = {entry.partition("-")[2]: entry for entry in table()}
        if folded not in table() and folded not in short:
            raise UserError(unknown("MODEL", name, (*table(), *short)))
        model = replace(table()[short.get(folded, folded)], **sizes)
    if model.heads % model.kv_heads:
        raise UserError(
            f"kv_heads: got {model.kv_heads}, expected a divisor of the {model.heads} heads"
        )
    return model
