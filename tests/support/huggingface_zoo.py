"""Model classes of the installed transformers, each built from a tiny config of its own kind."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import ringray
import ringray.models.huggingface as hf
from tests.support.huggingface_checks import SEQ_LEN, VOCABULARY

LARGEST = 20_000_000  # parameters of a model that is tiny enough
PAD = 1
HEADS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "sequence": "SEQUENCE_CLASSIFICATION",
    "token": "TOKEN_CLASSIFICATION",
    "question": "QUESTION_ANSWERING",
}
# Sizes by the names that configs give them.
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "d_model": 64, "n_embd": 64, "embedding_size": 64,
    "emb_dim": 64, "embed_dim": 64, "dim": 64, "model_dim": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "d_ff": 96, "n_inner": 96, "ffn_hidden_size": 96,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "d_inner": 96, "hidden_dim": 96, "d_embed": 64,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_intermediate_size": 32, "ffn_hidden_dim": 96, "num_hidden_layers": 2, "n_layer": 2,
    "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2, "depth": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "attention_head_dim": 16, "num_query_heads": 4,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256,
    "context_length": 256, "max_source_positions": 256, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8, "index_topk": 8, "index_n_heads": 2,
    "index_head_dim": 16, "state_size": 8, "time_step_rank": 4, "mamba_d_state": 8,
    "mamba_dt_rank": 4, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "mamba_n_groups": 1, "n_groups": 1, "ssm_state_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "lru_width": 64, "attention_window_size": 8, "sliding_window": 7,
    "type_vocab_size": 2, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "rotary_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 2, "local_attention": 8,
    "attention_chunk_size": 8, "attention_window": 8, "num_buckets": 8, "block_size": 4,
    "axial_pos_embds_dim": (32, 32), "axial_pos_shape": (8, 8), "bottleneck_size": 32,
    "kv_channels": 16, "nope_layer_interval": 2,
}  # fmt: skip
# Numbers without which a model is not what its users train.
_VALUES = {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
_SPECIAL = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2, "sep_token_id": 2,
            "cls_token_id": 0, "mask_token_id": 3, "image_token_id": 90, "video_token_id": 91,
            "audio_token_id": 92, "image_token_index": 90}  # fmt: skip
_OF_KIND: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 16}, "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "dots3_note": {"num_key_value_heads": 4}, "dots3_note_text": {"num_key_value_heads": 4},
    "esmc": {"num_key_value_heads": 4}, "mamba2": {"num_heads": 8, "head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["mamba", "mamba", "hybrid"]},
    "bailing_hybrid": {"n_group": 1, "num_group": 1}, "mistral4": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
    "reformer": {"is_decoder": True}, "gemma3n_text": {"num_kv_shared_layers": 0},
    "xmod": {"default_language": "en_XX"}, "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba2": {"num_hidden_layers": 2, "layer_types": ["mamba", "hybrid"]},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "mobilebert": {"true_hidden_size": 64, "intra_bottleneck_size": 64},
}  # fmt: skip


def classes(head: str) -> dict[str, str]:
    """Class names by model type."""
    mapping = getattr(modeling_auto, f"MODEL_FOR_{HEADS[head]}_MAPPING_NAMES")
    return {
        kind: name if isinstance(name, str) else name[0] for kind, name in sorted(mapping.items())
    }


def _tiny(cls: type, depth: int = 0) -> dict[str, Any]:
    given = cls().to_dict()
    made: dict[str, Any] = {}
    for name, value in given.items():
        if name in _VALUES:
            made[name] = _VALUES[name]
        elif name in _SPECIAL:
            made[name] = _SPECIAL[name]
        elif "dropout" in name or name.endswith(("_drop", "pdrop")):
            made[name] = 0.0 if isinstance(value, float) else value
        elif name in _SIZES and (value is not None or name == "num_key_value_heads"):
            made[name] = _SIZES[name]
        elif name in ("text_config", "decoder") and isinstance(value, dict) and depth < 2:
            sub = getattr(cls, "sub_configs", {}).get(name)
            if sub is not None and sub is not transformers.AutoConfig:
                made[name] = _tiny(sub, depth + 1)
            elif "model_type" in value:
                made[name] = {"model_type": value["model_type"]} | _tiny(
                    transformers.CONFIG_MAPPING[value["model_type"]], depth + 1
                )
    return made


@functools.lru_cache
def _sizes(kind: str) -> dict[str, Any]:
    made = _tiny(transformers.CONFIG_MAPPING[kind])
    if "qk_rope_head_dim" in made:
        made |= {"head_dim": made["qk_rope_head_dim"], "num_key_value_heads": 4}
    return made | _OF_KIND.get(kind, {})


def config(kind: str, cls: Any, **more: Any) -> Any:
    """A tiny config of a model type, or the part of it that the class takes."""
    made = transformers.CONFIG_MAPPING[kind](**_sizes(kind) | more)
    if not isinstance(made, cls.config_class or type(made)):
        parts = (getattr(made, name) for name in made.sub_configs)
        made = next((part for part in parts if isinstance(part, cls.config_class)), made)
    made.use_cache = False
    return made


def build(kind: str, name: str, attention: str, **more: Any) -> nn.Module:
    """A model whose parameters are all drawn, in every process alike: none begins at 0 or 1."""
    cls = getattr(transformers, name)
    with torch.device("meta"):
        count = sum(x.numel() for x in cls._from_config(config(kind, cls, **more)).parameters())
    if count > LARGEST:
        raise MemoryError(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    made: nn.Module = cls._from_config(config(kind, cls, **more), attn_implementation=attention)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(drawn * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(drawn * 0.1)
    return made.eval()


class Case(NamedTuple):
    """One model class and what its config changes."""

    head: str
    kind: str
    name: str
    changes: dict[str, Any] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        return f"{self.name} ({self.head}, {self.kind})" + "".join(
            f" {name}={value}" for name, value in {**self.changes, **self.options}.items()
        )


class Row(NamedTuple):
    """The end of a case: right, refused, unbuilt or WRONG; errors or the sentence."""

    case: str
    verdict: str
    why: str
    logits: float = 0.0
    loss: float | None = None
    gradient: float = 0.0


def cases(heads: Sequence[str] = tuple(HEADS)) -> list[Case]:
    """Every model class of the installed transformers."""
    return [Case(head, kind, name) for head in heads for kind, name in classes(head).items()]


DYNAMIC = {
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}
LONG = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8, "long_factor": [1.5 + i for i in range(8)],
    },
}  # fmt: skip
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def tokens(case: Case, count: int) -> tuple[Tensor, Tensor | None]:
    """Input ids and labels; the second row ends with padding where a head pools a token."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 80, (2, SEQ_LEN), generator=generator)
    if case.head == "question":
        return ids, None
    if case.head == "sequence":
        ids[:, 39], ids[1, 40:] = 2, PAD
        return ids, torch.randint(count, (2,), generator=generator)
    labels = torch.randint(min(count, 80), (2, SEQ_LEN), generator=generator)
    labels[:, :20] = -100
    labels[0, 40:43] = -100
    return ids, labels


def outputs(out: Any) -> dict[str, Tensor]:
    """The outputs that a user takes."""
    names = ("logits", "start_logits", "end_logits")
    found = {name: out[name] for name in names if out.get(name) is not None}
    assert found, f"outputs {list(out)}"
    return found


def _weights(x: Tensor) -> Tensor:
    """Numbers (B, S, ...) for a sum that stands for a loss: other ones for each token."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) / x.shape[1]


def in_one_process(model: nn.Module, case: Case, labels: bool) -> dict[str, Tensor]:
    ids, targets = tokens(case, _labels(model))
    more = {"labels": targets} if labels and targets is not None else {}
    out = model(input_ids=ids, use_cache=False, **more)
    found = outputs(out)
    loss = out.loss if more else sum((x * _weights(x)).sum() for x in found.values())
    loss.backward()
    return {**found, "loss": loss}


def on_ring(model: nn.Module, case: Case, labels: bool) -> dict[str, Tensor]:
    ids, targets = tokens(case, _labels(model))
    options = dict(case.options) if labels else {}
    partition = options.setdefault("partition", "zigzag")
    batch = hf.shard_batch(model, ids, labels=targets if labels else None, **options)
    out = model(**batch)
    found = outputs(out)
    rows = batch["input_ids"].shape
    per_token = {name for name, x in found.items() if x.shape[:2] == rows}
    if labels and targets is not None:
        loss = out.loss
    else:
        parts = []
        for name, x in found.items():
            if name in per_token:
                weights = _weights(x.new_empty(len(x), SEQ_LEN, *x.shape[2:]))
                parts.append((x * ringray.shard(weights, dim=1, partition=partition)).sum())
            else:
                parts.append((x * _weights(x)).sum() / dist.get_world_size())
        loss = sum(parts)
    loss.backward()
    whole = {
        name: ringray.unshard(x, dim=1, partition=partition, seq_len=SEQ_LEN)
        if name in per_token
        else x
        for name, x in found.items()
    }
    total = loss.detach() / (dist.get_world_size() if options.get("gradients") == "mean" else 1)
    dist.all_reduce(total)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        if options.get("gradients") == "mean":
            parameter.grad /= dist.get_world_size()
    return {**whole, "loss": total}


def _labels(model: nn.Module) -> int:
    return int(getattr(model.config, "num_labels", 2))


def error(got: Tensor, want: Tensor, floor: float = 1e-12) -> float:
    """Norm of the difference, relative to ``want``; NaN is infinite."""
    found = float(
        (got.detach().double() - want.detach().double()).norm()
        / max(float(want.detach().double().norm()), floor)
    )
    return found if found == found else float("inf")


def compare(case: Case, labels: bool = True) -> Row:
    """One case on this ring; every rank calls it."""
    name = str(case)
    try:
        model = build(case.kind, case.name, "eager", **case.changes)
        want = in_one_process(model, case, labels)
        ring = build(case.kind, case.name, hf.NAME, **case.changes)
    except Exception as failure:
        return Row(name, "unbuilt", f"{type(failure).__name__}: {str(failure)[:200]}")
    refusal: str | None = None
    try:
        got = on_ring(ring, case, labels)
    except Exception as failure:
        refusal = f"{type(failure).__name__}: {failure}"
    refusals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal)
    if any(refusals):
        if labels and all(x and x.startswith("ValueError: labels:") for x in refusals):
            return compare(case, labels=False)._replace(why="labels refused")
        by_sentence = all(x and x.startswith(("ValueError", "RefusedError")) for x in refusals)
        return Row(name, "refused" if by_sentence else "WRONG", str(refusal or refusals))
    row = Row(
        name,
        "right",
        "",
        max(error(got[x], want[x]) for x in outputs(want)),
        error(got["loss"], want["loss"]),
        _gradients(ring, model),
    )
    right = row.logits < 1e-4 and row.loss < 1e-4 and row.gradient < 1e-3
    return row if right else row._replace(verdict="WRONG")


def _gradients(got: nn.Module, want: nn.Module) -> float:
    """The largest error of a parameter's gradient, of those that are not rounding."""
    grads = [
        (p.grad, q.grad if q.grad is not None else torch.zeros_like(q))
        for p, q in zip(got.parameters(), want.parameters(), strict=True)
    ]
    largest = max(float(q.norm()) for _, q in grads)
    return max(error(p, q, 1e-3 * largest) for p, q in grads)


def table(rank: int, size: int, chosen: Sequence[Case], path: Path) -> None:
    """Writes a line of JSON for each case; for ``tests.support.ranks.on_ring``."""
    hf.register()
    transformers.logging.set_verbosity_error()
    for case in chosen:
        row = compare(case)
        rows: list[Any] = [None] * size
        dist.all_gather_object(rows, row)
        worst = max(rows, key=lambda x: (x.verdict == "WRONG", x.logits))
        if rank == 0:
            with path.open("a") as file:
                file.write(json.dumps(worst._asdict()) + "\n")
