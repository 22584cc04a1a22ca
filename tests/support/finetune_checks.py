"""Tiny pretrained models, and checks of every rank that fine-tunes them by the example."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ringray
import ringray.models.huggingface as hf

PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "finetune.py"
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def _rope(**table: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, **table}}


# Name: class, options of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {**_rope(**LLAMA_3), "tie_word_embeddings": True}),
    "llama3 of before": ("Llama", {"rope_theta": 5e5, "rope_scaling": LLAMA_3}),
    "yarn": (
        "Qwen2", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "longrope": (
        "Phi3",
        _rope(
            rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8,
            original_max_position_embeddings=32,
        ),
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
}  # fmt: skip


def program() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("finetune", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pretrained(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Writes a model of random weights with its tokenizer."""
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    place = folder / name
    model.save_pretrained(place)
    words = {chr(32 + i): i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(place)
    return place


def given(model: Path | None = None, **options: Any) -> Namespace:
    """Arguments of the program."""
    defaults = {"seq_len": 101, "rope_theta": None, "steps": 4, "rate": None}
    return Namespace(model=model and str(model), **{**defaults, **options})


def frequencies(model: Any) -> dict[str, torch.Tensor]:
    """Those of all tables of a model's RoPE."""
    rotary = model.base_model.rotary_emb
    return {name: x.float() for name, x in rotary.named_buffers() if name.endswith("inv_freq")}


def an_export_has_the_logits(folder: Path, name: str, rank: int, size: int) -> None:
    """Of the model on the ring, after a step, in another process without a ring."""
    example, place = program(), folder / name
    hf.register()
    model, dtype = example.load(given(place, rope_theta=4e6))
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    mesh = ringray.make_mesh()
    ringray.parallelize(model, mesh, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(101)[None] % 61
    batch = hf.shard_batch(model, ids, labels=ids, group=mesh.ring, gradients="mean")
    model(**batch).loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        batch = hf.shard_batch(model, ids, group=mesh.ring)
        got = ringray.unshard(model(**batch).logits, dim=1, seq_len=101, group=mesh.ring)
    exported = folder / f"{name}-exported"
    example.export(model, dtype, str(exported), str(place))
    plain = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager").eval()
    assert plain.dtype == dtype
    assert type(plain).__name__ in plain.config.architectures
    with torch.no_grad():
        want = plain(ids).logits
    # Attention by blocks rounds otherwise.
    allowed = 2e-5 if dtype == torch.float32 else 2e-2
    assert (got - want).norm() <= allowed * want.norm()
