"""Decoders as groups of layers that are alike: their products, states, experts, parameters, FLOPs.

Imports numpy only, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ringray.traffic.geometry import total_visible
from ringray.traffic.mask import Mask


class Product(NamedTuple):
    """A matrix of ``k`` rows and ``n`` columns that each token is multiplied with. ``split``: the
    side that tensor parallelism divides, if any."""

    k: int
    n: int
    split: Literal["k", "n"] | None = None

    @property
    def elements(self) -> int:
        """Returns its parameters."""
        return self.k * self.n


@dataclass(frozen=True)
class Latent:
    """Ranks of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), features of a token.

    ``query``: of queries, None where they have none; ``key``: of keys and values together;
    ``rope``: of the rotated part of a key, one for all heads."""

    query: int | None
    key: int
    rope: int


@dataclass(frozen=True)
class Attention:
    """Softmax attention of one layer. ``head_dim``: of Q and K, ``value_dim``: of V.

    ``window``: keys before a query that it sees, None: all; ``chunk``: it sees its own of chunks
    of this length; ``latent``: training expands it, to ``kv_heads`` keys and values; ``gated``:
    its result is multiplied with a gate of each feature.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None
    latent: Latent | None = None
    gated: bool = False

    def products(self, hidden: int) -> list[Product]:
        """Returns its matrices: Q, K, V, the gate and the last one."""
        queries, values = self.heads * self.head_dim, self.heads * self.value_dim
        last = Product(values, hidden, "k")
        if self.latent is None:
            keys = [self.kv_heads * self.head_dim, self.kv_heads * self.value_dim]
            widths = [queries, *keys, *[values] * self.gated]
            return [*(Product(hidden, width, "n") for width in widths), last]
        query, key, rope = self.latent.query, self.latent.key, self.latent.rope
        products = [Product(query or hidden, queries, "n"), Product(hidden, key + rope)]
        products += [Product(hidden, query)] if query else []
        return [*products, Product(key, queries - self.heads * rope + values, "n"), last]

    def flops(self, pairs: float) -> float:
        """Returns FLOPs of so many visible pairs of a query and a key, all heads, forward."""
        return 2 * (self.head_dim + self.value_dim) * self.heads * pairs

    def pairs(self, context: int) -> int:
        """Returns the visible pairs of one sequence."""
        return total_visible(Mask(context, True, self.window, chunk=self.chunk))

    @property
    def latent_width(self) -> int:
        """Returns features of a token between the two products of Q and of K and V."""
        ranks = self.latent
        return 0 if ranks is None else (ranks.query or 0) + ranks.key + ranks.rope


@dataclass(frozen=True)
class Recurrence:
    """Linear attention or a state-space layer: a state of each head, read and written by each
    token.

    ``inputs``: features of a token that the layer's input is projected to, by matrix; ``inner``:
    further matrices; ``output``: features that the last matrix takes; ``channels``: of its
    convolution over ``kernel`` tokens; ``vectors``: parameters beside matrices and convolution;
    ``state``: elements, of all heads; ``state_flops``: of an element of it and a token, forward.
    """

    kind: str
    inputs: tuple[int, ...]
    output: int
    channels: int
    kernel: int
    state: int
    state_flops: int
    inner: tuple[Product, ...] = ()
    vectors: int = 0

    def products(self, hidden: int) -> list[Product]:
        """Returns its matrices."""
        inputs = (Product(hidden, width, "n") for width in self.inputs)
        return [*inputs, *self.inner, Product(self.output, hidden, "k")]

    @property
    def parameters(self) -> int:
        """Returns parameters beside the matrices."""
        return self.channels * self.kernel + self.vectors

    @property
    def flops(self) -> int:
        """Returns FLOPs of convolution and state, per token, forward."""
        return 2 * self.channels * self.kernel + self.state_flops * self.state

    @property
    def width(self) -> int:
        """Returns features of a token between the products, those of the convolution twice."""
        between = sum(product.n for product in self.inner)
        return sum(self.inputs) + between + self.channels + self.output


@dataclass(frozen=True)
class Mlp:
    """MLP of one layer. ``gated``: three matrices, else two. ``intermediate``: of the dense part
    that each token takes, ``shared_intermediate``: of experts that each token takes; of
    ``experts`` others, each of ``expert_intermediate``, it takes the ``active`` best."""

    intermediate: int
    gated: bool = True
    experts: int = 0
    active: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0

    def products(self, hidden: int) -> list[Product]:
        """Returns the matrices that each token is multiplied with; the router is one."""
        widths = [width for width in (self.intermediate, self.shared_intermediate) if width]
        router = [Product(hidden, self.experts)] * (self.experts > 0)
        return [part for width in widths for part in self._parts(hidden, width)] + router

    def expert_products(self, hidden: int) -> list[Product]:
        """Returns the matrices of one expert."""
        return self._parts(hidden, self.expert_intermediate) if self.experts else []

    def _parts(self, hidden: int, width: int) -> list[Product]:
        return [Product(hidden, width, "n")] * (1 + self.gated) + [Product(width, hidden, "k")]

    @property
    def width(self) -> int:
        """Returns features inside, of a token and all of its experts."""
        return self.intermediate + self.shared_intermediate + self.active * self.expert_intermediate


@dataclass(frozen=True)
class LayerGroup:
    """``count`` layers that are alike: a norm and a mixer of tokens, a norm and an MLP. Either may
    be None. ``beside``: computes from the mixer's input, too, and its result is added."""

    count: int
    mixer: Attention | Recurrence | None
    mlp: Mlp | None
    beside: Recurrence | None = None

    @property
    def attention(self) -> Attention | None:
        """Returns the mixer where it is attention."""
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def recurrences(self) -> list[Recurrence]:
        """Returns what has a state, if anything."""
        return [part for part in (self.mixer, self.beside) if isinstance(part, Recurrence)]

    def products(self, hidden: int) -> list[Product]:
        """Returns the matrices that each token is multiplied with, routed experts left out."""
        parts = (self.mixer, self.beside, self.mlp)
        return [product for part in parts if part for product in part.products(hidden)]

    def active_matrices(self, hidden: int) -> int:
        """Returns elements of the matrices that a token is multiplied with, in one layer."""
        experts = self.expert_parameters(hidden) - self.expert_parameters(hidden, idle=True)
        return sum(product.elements for product in self.products(hidden)) + experts

    def expert_parameters(self, hidden: int, *, idle: bool = False) -> int:
        """Returns parameters of all routed experts of one layer, or of those that a token does not
        take."""
        if self.mlp is None:
            return 0
        experts = self.mlp.experts - idle * self.mlp.active
        return experts * sum(product.elements for product in self.mlp.expert_products(hidden))

    def parameters(self, hidden: int) -> int:
        """Returns the parameters of one layer, its norms included."""
        norms = hidden * ((self.mixer is not None) + (self.mlp is not None))
        of_states = sum(part.parameters for part in self.recurrences)
        dense = sum(product.elements for product in self.products(hidden))
        return dense + of_states + norms + self.expert_parameters(hidden)

    def flops(self, hidden: int) -> int:
        """Returns FLOPs of one layer, per token, forward, attention left out."""
        states = sum(part.flops for part in self.recurrences)
        return 2 * self.active_matrices(hidden) + states


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder. ``gated``: its MLP has three matrices, else two. ``tied``: one matrix
    embeds and unembeds.

    ``mixed``: groups of layers that are not all plain full attention and an MLP of the sizes
    before, which are those of its main attention and MLP then; empty where all are.
    ``heads_ahead``: for tokens after the next one, which no total here counts. ``positions``:
    tokens that it was made for, 0 if it is not known. ``assumptions``: about what a model's file
    does not say, sentences.
    """

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
    mixed: tuple[LayerGroup, ...] = ()
    heads_ahead: int = 0
    positions: int = 0
    assumptions: tuple[str, ...] = ()

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Returns the groups of layers that are alike, one where all are."""
        attention = Attention(self.heads, self.kv_heads, self.head_dim, self.head_dim)
        uniform = LayerGroup(self.layers, attention, Mlp(self.intermediate, self.gated))
        return self.mixed or (uniform,)

    @property
    def unlike(self) -> list[str]:
        """Returns what its layers have that those of a plain decoder have not, by the fields of a
        ``config.json``."""
        attention = [group.attention for group in self.groups if group.attention]
        present = {
            "sliding_window": any(part.window is not None for part in attention),
            "attention_chunk_size": any(part.chunk for part in attention),
            "kv_lora_rank": any(part.latent for part in attention),
            "a gate of attention": any(part.gated for part in attention),
            "num_experts": any(group.mlp and group.mlp.experts for group in self.groups),
            "linear attention or states": any(group.recurrences for group in self.groups),
        }
        return [name for name, there in present.items() if there]

    @property
    def plain(self) -> dict[str, Any]:
        """Returns its name and sizes, by field: all there is to a model of plain layers."""
        beside = ("mixed", "heads_ahead", "positions", "assumptions")
        names = (item.name for item in fields(self) if item.name not in beside)
        return {name: getattr(self, name) for name in names}

    @property
    def outer_parameters(self) -> int:
        """Returns the parameters of embedding, logits and the last norm."""
        return self.hidden * (self.vocab * (2 - self.tied) + 1)

    @property
    def parameters(self) -> int:
        """Returns all parameters."""
        layers = sum(group.count * group.parameters(self.hidden) for group in self.groups)
        return layers + self.outer_parameters

    @property
    def active_parameters(self) -> int:
        """Returns the parameters that a token is computed with, all but those of other experts."""
        return self.parameters - sum(
            group.count * group.expert_parameters(self.hidden, idle=True) for group in self.groups
        )

    def forward_flops(self, context: int) -> int:
        """Returns FLOPs of one sequence, forward, by its visible pairs."""
        attending = ((group.count, group.attention) for group in self.groups if group.attention)
        attention = sum(int(count * of.flops(of.pairs(context))) for count, of in attending)
        return context * self.token_flops + attention

    @property
    def token_flops(self) -> int:
        """Returns FLOPs of a token's products and states, forward, attention left out."""
        layers = sum(group.count * group.flops(self.hidden) for group in self.groups)
        return layers + 2 * self.hidden * self.vocab

    def attention_flops(self, pairs: float) -> float:
        """Returns FLOPs of the attention of all layers to visible pairs, as many in each layer,
        forward."""
        return sum(
            group.count * group.attention.flops(pairs) for group in self.groups if group.attention
        )

    def paper_flops(self, context: int) -> int:
        """Returns FLOPs of one sequence, forward, by the paper's formula (appendix C): 12 h² and
        all pairs, without logits."""
        h, s = self.hidden, context
        return self.layers * (24 * s * h**2 + 4 * s**2 * h)
