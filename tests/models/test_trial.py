"""The trial of models: which of them mix tokens only on the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import ringray
from ringray.models.decoder import Decoder
from ringray.models.sizes import named
from ringray.models.trial import refuse_unrouted
from ringray.nn import keep_attention

VOCABULARY, HIDDEN = 64, 32
TINY = named("llama-tiny", {})


def ring(**options: Any) -> nn.Module:
    return ringray.ContextParallelAttention(HIDDEN, 4, **options)


class Model(nn.Module):
    """Embedding, layers on a residual stream, logits."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(layers)

    def stream(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.stream(self.words(ids)))


class Attention(nn.Module):
    """Projections around attention of a model's own."""

    def __init__(self, attend: Callable[..., Tensor], last: float = 1.0) -> None:
        super().__init__()
        self.qkv, self.attend, self.last = nn.Linear(HIDDEN, 3 * HIDDEN), attend, last

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).flatten(2) * self.last


class Layer(nn.Module):
    """A layer that is one function, perhaps of a module."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.parts)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]


class WithPositions(Model):
    """A model that requires more than tokens."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.places = nn.Embedding(100, HIDDEN)

    def forward(self, ids: Tensor, positions: Tensor, *, seq_len: int) -> Any:
        assert seq_len == ids.shape[1]
        return self.head(self.stream(self.words(ids) + self.places(positions)))


class Indexed(Model):
    """A model without a call of an embedding, and with another result."""

    @dataclass
    class Result:
        """Returns its results."""

        logits: Tensor

    def forward(self, ids: Tensor | None = None) -> Any:
        return self.Result(self.head(self.stream(self.words.weight[ids])))


class Stream(Model):
    """A stage that takes a stream."""

    def forward(self, x: Tensor) -> Any:
        return (self.stream(x), None)


class Loss(Model):
    """A model that returns a loss alone."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return ringray.sharded_cross_entropy(super().forward(ids), labels)


class Unused(Model):
    """A model that calls no layer."""

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.words(ids))


class Pooled(Model):
    """A model of one result for a sequence."""

    def forward(self, ids: Tensor) -> Any:
        return {"classes": super().forward(ids).mean(1)}


def experts(x: Tensor, router: nn.Module, *some: nn.Module) -> Tensor:
    rows = x.flatten(0, 1)
    weights, chosen = router(rows).softmax(-1).topk(1)
    out = torch.zeros_like(rows)
    for i, expert in enumerate(some):
        places = (chosen[:, 0] == i).nonzero().flatten()
        out = out.index_add(0, places, expert(rows[places]) * weights[places])
    return out.view_as(x)


def transposed(x: Tensor, part: nn.Module) -> Tensor:
    return part(x.mT).mT


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: Model(ring(), ring(window=3, rope_theta=None)),
    "module alone": ring,
    "op": lambda: Model(Attention(ringray.ring_attention)),
    "decoder": lambda: Decoder(TINY, kept="input", mlp_rows=7),
    "stream": lambda: Stream(ring()),
    "positions": lambda: WithPositions(ring()),
    "indexed": lambda: Indexed(ring()),
    "loss": lambda: Loss(ring()),
    "compiled": lambda: torch.compile(Model(ring())),  # type: ignore[dict-item]
    "experts": lambda: Model(ring(), Layer(experts, *[nn.Linear(HIDDEN, n) for n in (2, 32, 32)])),
    "checkpointed": lambda: Model(
        Layer(
            lambda x, part: checkpoint(part, x, use_reentrant=False, context_fn=keep_attention),
            ring(),
        )
    ),
}
WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fused operator": (lambda: Model(Attention(fused)), r"in layers.0 \(Attention\)"),
    "flex": (lambda: Model(Attention(flex_attention)), r"in layers.0 \(Attention\)"),
    "some layers": (lambda: Model(ring(), Attention(sdpa), ring()), r"in layers.1 \(Attention\)"),
    "convolution": (
        lambda: Model(ring(), Layer(transposed, nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1))),
        "Conv1d",
    ),
    "mean": (lambda: Model(ring(), Layer(lambda x: x - x.mean(1, keepdim=True))), "in layers.1"),
    "pooled": (lambda: Pooled(ring()), "in its result"),
    "batch norm": (
        lambda: Model(ring(), Layer(transposed, nn.BatchNorm1d(HIDDEN))), "BatchNorm",
    ),
    "compiled": (lambda: torch.compile(Model(ring(), Attention(sdpa))), "in _orig_mod.layers.1"),  # type: ignore[dict-item]
    "unused": (lambda: Unused(ring()), "no layer calls the ring"),
    "partitions": (lambda: Model(ring(), ring(partition="striped")), r"\['striped', 'zigzag'\]"),
    "no weights yet": (lambda: Model(ring()).to("meta"), "weights that are not on the meta device"),
    "other inputs": (lambda: Model(Layer(lambda x: x.items())), "a trial of Model fails"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_models_that_attend_by_the_ring_alone_pass(name: str) -> None:
    refuse_unrouted(RIGHT[name](), None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", WRONG)
def test_models_that_mix_tokens_otherwise_are_refused(name: str) -> None:
    make, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        refuse_unrouted(make(), None)


def test_what_it_cannot_guess_it_is_told() -> None:
    class Two(Model):
        def forward(self, ids: Tensor, image: Tensor) -> Any:
            return super().forward(ids) + self.head(image)

    ids, image = torch.ones(2, 6, dtype=torch.int64), torch.zeros(2, 6, HIDDEN)
    with pytest.raises(ValueError, match=r"trial of Two fails .* inputs=\(\.\.\.\)"):
        refuse_unrouted(Two(ring()), None)
    refuse_unrouted(Two(ring()), None, (ids, image))
    with pytest.raises(ValueError, match=r"in layers.0 \(Attention\)"):
        refuse_unrouted(Two(Attention(sdpa)), None, (ids, image))


class Numbered(Model):
    """Learned positions, which it counts itself unless it is given them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.places = nn.Embedding(512, HIDDEN)

    def forward(self, ids: Tensor) -> Any:
        return self.placed(ids, torch.arange(ids.shape[1]))

    def placed(self, ids: Tensor, positions: Tensor) -> Any:
        return self.head(self.stream(self.words(ids) + self.places(positions)))


class Response(Numbered):
    def forward(self, ids: Tensor, positions: Tensor) -> Any:  # type: ignore[override]
        return self.placed(ids, positions)


def test_rows_that_are_numbered_by_rank_are_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    refuse_unrouted(Response(ring()), None)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="Numbered numbers the rows of each rank from 0"):
        refuse_unrouted(Numbered(ring()), None)


def test_the_model_stays_as_it_was() -> None:
    def count(x: Tensor, part: nn.Module) -> Tensor:
        seen = part.get_buffer("running")
        seen += x.sum((0, 1))
        return x

    part = nn.Module()
    part.register_buffer("running", torch.zeros(HIDDEN))
    model = Model(ring(), Layer(count, part))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for inputs in (None, (torch.zeros(2, 6),)):  # of which one fails
        try:
            refuse_unrouted(model, None, inputs)
        except ValueError:
            assert inputs is not None
        assert model.training
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        assert not any(part._forward_hooks for part in model.modules())
