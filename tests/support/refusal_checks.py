"""Kinds of models, right and wrong on a ring, and what ``parallelize`` says of them.

``RIGHT``: tokens meet by the ring alone. ``WRONG``: elsewhere too, or only there; and the words of
the error. What makes a model returns it, perhaps with inputs of its forward.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers.modeling_outputs import CausalLMOutput

import ringray
import ringray.models.huggingface as hf

VOCABULARY, HIDDEN, HEADS = 64, 32, 4
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
}
IDS = torch.ones(1, 22, dtype=torch.int64)
PIXELS = torch.zeros(1, 3, 32, 32)


def ring() -> nn.Module:
    return ringray.ContextParallelAttention(HIDDEN, HEADS)


class Model(nn.Module):
    """Embedding, layers on a residual stream, logits."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class KeywordOnly(Model):
    def forward(self, *, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


class OfBatch(Model):
    """A model that takes a batch as a dictionary."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["ids"])


class Own(nn.Module):
    """Attention of a model's own."""

    def __init__(self, attend: Callable[..., Tensor] = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return self.attend(heads, heads, heads).transpose(1, 2).flatten(2)


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.cell(x)[0]
        return result


class OnGroup(nn.Module):
    """The op on a group of its own choice."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        out: Any = ringray.ring_attention(heads, heads, heads, group=self.group)
        result: Tensor = out.transpose(1, 2).flatten(2)
        return result


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # it is not compiled
        return flex_attention(q, k, v)  # type: ignore[return-value]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def llama(implementation: str = hf.NAME) -> Any:
    hf.register()
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **SIZES)
    make = transformers.AutoModelForCausalLM.from_config
    return make(config, attn_implementation=implementation)


def llama_with_a_layer_by_sdpa() -> nn.Module:
    model = llama()
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "sdpa"
    return model  # type: ignore[no-any-return]


def mamba() -> nn.Module:
    hf.register()
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=1, state_size=4
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=hf.NAME)  # type: ignore[no-any-return]


class LowRank(nn.Module):
    """A frozen projection and a trained one of low rank, as PEFT's LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


class Adapted(nn.Module):
    """A model in a wrapper, whose query projections have adapters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model.requires_grad_(False)
        for part in [*model.modules()]:
            if isinstance(getattr(part, "q_proj", None), nn.Linear):
                part.q_proj = LowRank(part.q_proj)  # type: ignore[arg-type]

    def forward(self, *args: Any, **batch: Any) -> Any:
        return self.base_model(*args, **batch)


class Headed(nn.Module):
    """A transformers model, or its backbone alone, with layers and results of one's own."""

    def __init__(
        self, result: Callable[[Tensor], Any], *layers: nn.Module, part: str = "lm"
    ) -> None:
        super().__init__()
        self.lm, self.part, self.result = llama(), part, result
        self.layers = nn.Sequential(*layers)

    def forward(self, **batch: Any) -> Any:
        stream = self.get_submodule(self.part)(**batch)
        hidden = stream.logits if self.part == "lm" else stream.last_hidden_state
        return self.result(self.layers(hidden[..., :HIDDEN]))


class Taught(nn.Module):
    """A model beside a teacher that attends otherwise, as in distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = llama(), llama("sdpa")

    def forward(self, input_ids: Tensor, **batch: Any) -> Tensor:
        student = self.student(input_ids=input_ids, **batch).logits
        result: Tensor = student - self.teacher(input_ids=input_ids).logits
        return result


class Seeing(Model):
    """A model of tokens and of an image, whose patches no ring shards."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        config = transformers.CLIPVisionConfig(
            num_hidden_layers=1, image_size=32, patch_size=16, **SIZES
        )
        make = transformers.CLIPVisionModel._from_config
        self.vision = make(config, attn_implementation="sdpa")

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids) + self.head(self.vision(pixels).pooler_output)[:, None]


def compiled(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def logits(x: Tensor) -> CausalLMOutput:
    return CausalLMOutput(logits=x)  # type: ignore[arg-type]


Maker = Callable[[], Any]
RIGHT: dict[str, Maker] = {
    "module": lambda: Model(ring(), ring()),
    "op": lambda: Model(OnGroup(None)),
    "compiled": lambda: torch.compile(Model(ring()), backend="eager"),
    "compiled in place": lambda: compiled(Model(ring())),
    "adapters": lambda: Adapted(Model(ring())),
    "keyword only": lambda: KeywordOnly(ring()),
    "dictionary": lambda: (OfBatch(ring()), ({"ids": IDS},)),
    "image beside tokens": lambda: (Seeing(ring()), (IDS, PIXELS)),
    "half": lambda: Model(ring()).bfloat16(),
    "transformers": llama,
    "transformers, adapters": lambda: Adapted(llama()),
    "transformers, compiled": lambda: torch.compile(llama(), backend="eager"),
    "transformers, logits alone": lambda: Headed(lambda x: x),
    "transformers, head on a backbone": lambda: Headed(logits, nn.Linear(32, 8), part="lm.model"),
    "transformers, a loss": lambda: Headed(lambda x: (x.sum(), None), part="lm.model"),
}
WRONG: dict[str, tuple[Maker, str]] = {
    "SDPA": (lambda: Model(Own()), r"in layers.0 \(Own\) tokens"),
    "MultiheadAttention": (lambda: Model(Multihead()), "in layers.0.attention"),
    "TransformerEncoder": (lambda: Model(encoder()), r"in layers.0.layers.0.self_attn"),
    "FlexAttention": (lambda: Model(Own(flex)), "in layers.0"),
    "a mixture": (lambda: Model(ring(), Own(), ring()), "in layers.1"),
    "a mixture, compiled": (lambda: compiled(Model(ring(), Own())), "in layers.1"),
    "a mixture with adapters": (lambda: Adapted(Model(ring(), Own())), "in base_model.layers.1"),
    "recurrent": (lambda: Model(ring(), Recurrent()), r"in layers.1.cell \(GRU\)"),
    "no attention": (lambda: Model(nn.Linear(HIDDEN, HIDDEN)), "no layer calls the ring"),
    "another group": (
        lambda: Model(OnGroup(dist.new_group([dist.get_rank()], use_local_synchronization=True))),
        r"got a layer on the ring of ranks \[\d\], expected that of the mesh, \[0, 1\]",
    ),
    "keyword only": (lambda: KeywordOnly(Own()), "in layers.0"),
    "dictionary": (lambda: (OfBatch(Own()), ({"ids": IDS},)), "in layers.0"),
    "image beside tokens": (lambda: (Seeing(ring(), Own()), (IDS, PIXELS)), "in layers.1"),
    "transformers, sdpa": (lambda: llama("sdpa"), "attends by 'sdpa', expected 'ringray'"),
    "transformers, eager": (lambda: llama("eager"), "attends by 'eager'"),
    "transformers, flex": (lambda: llama("flex_attention"), "attends by 'flex_attention'"),
    "transformers, in a wrapper": (lambda: Adapted(llama("sdpa")), "attends by 'sdpa'"),
    "transformers, with inputs": (lambda: (llama("sdpa"), (IDS,)), "model.layers.0.self_attn"),
    "transformers, some layers": (llama_with_a_layer_by_sdpa, "in model.layers.1.self_attn"),
    "transformers, own layer after": (
        lambda: Headed(logits, Own(), part="lm.model"),
        r"in layers.0 \(Own\)",
    ),
    "transformers, own loss": (lambda: Headed(lambda x: x.sum(), Own()), r"in layers.0 \(Own\)"),
    "transformers, own pooling": (lambda: Headed(lambda x: x.mean(1)), "in its result"),
    "transformers, a teacher": (Taught, "in teacher.model.layers.0.self_attn"),
    "transformers, no attention": (mamba, "tokens reach others without"),
    "transformers, another signature": (
        lambda: Adapted(nn.Sequential(llama())),
        "a trial of Adapted fails: TypeError",
    ),
}


def _parallelized(make: Maker, mesh: Any) -> None:
    torch.manual_seed(0)  # every rank has the same weights
    made = make()
    model, inputs = made if isinstance(made, tuple) else (made, None)
    ringray.parallelize(model, mesh, inputs=inputs)


def passes(name: str, rank: int, size: int) -> None:
    _parallelized(RIGHT[name], ringray.make_mesh())


def is_refused(name: str, rank: int, size: int) -> None:
    make, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        _parallelized(make, ringray.make_mesh())


def a_ring_of_one_takes_attention_of_any_kind(rank: int, size: int) -> None:
    """Replicas hold whole sequences; only a layer that reaches other replicas is wrong."""
    mesh = ringray.make_mesh(dp=size)
    for name, (make, _) in WRONG.items():
        try:
            _parallelized(make, mesh)
        except ValueError as error:
            raise AssertionError(name) from error
    with pytest.raises(ValueError, match=r"ranks \[0, 1\], expected that of the mesh, \[0\]"):
        _parallelized(RIGHT["op"], mesh)
