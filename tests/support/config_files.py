"""Files of models, and the models that transformers makes of the same fields."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ringray.models import config_json
from ringray.models.sizes import Attention, LayerGroup, Model, Recurrence

# What classes of transformers do not make by themselves: sizes that fit each other, layers of each
# kind, experts.
CHANGED: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "glm4_moe": {"head_dim": 128},
    "nemotron_h": {"num_hidden_layers": None, "hybrid_override_pattern": "M-M*E-ME"},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention"] * 2},
    "bamba": {"attn_layer_indices": [2, 5]},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "jamba": {"num_hidden_layers": 8},
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 2},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4},
    "ernie4_5_moe": {"moe_layer_end_index": 4, "moe_layer_interval": 2},
    "qwen2_moe": {"decoder_sparse_step": 2, "num_hidden_layers": 7},
    "qwen3_moe": {"mlp_only_layers": [0, 3]},
    "llama4_text": {"interleave_moe_layer_step": 2},
}
KINDS = {
    "full_attention": "full",
    "hybrid": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "state",
    "conv": "state",
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}


def of(**changed: Any) -> Model:
    facts = {**LLAMA, **changed}
    return config_json.of_facts("F", "it", {k: v for k, v in facts.items() if v is not ...})


def kind(group: LayerGroup) -> str:
    mixer = group.mixer
    if isinstance(mixer, Attention):
        return "window" if mixer.window is not None else "chunk" if mixer.chunk else "full"
    return "state" if isinstance(mixer, Recurrence) else "mlp"


def kinds(model: Model) -> Counter[str]:
    count: Counter[str] = Counter()
    for group in model.groups:
        count[kind(group)] += group.count
    return count


def built(transformers: Any, family: str, **sizes: Any) -> tuple[Any, int]:
    """Returns transformers' config and the parameters of its model, without weights."""
    config = transformers.CONFIG_MAPPING[family](**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return config, sum(weight.numel() for weight in model.parameters())
