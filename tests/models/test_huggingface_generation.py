"""``huggingface.generate`` on real rings, beside ``generate()`` of the model in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import ringray
import ringray.models.huggingface as hf
from ringray.attention.decode import ring_decode
from ringray.models.huggingface import attention
from tests.support.exhaustive import exhaustive
from tests.support.huggingface_checks import TINY, VOCABULARY, tiny
from tests.support.ranks import on_ring

NEW = 9


def prompts(length: int = 17, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (2, length), generator=generator)  # none of them special


def right(rank: int, size: int) -> None:
    """Token by token, and score by score, what one process generates; shared heads, a window."""
    for family, length, partition in (
        ("llama", 17, "zigzag"), ("mistral", 30, "striped"), ("llama", 2, "zigzag"),
        ("llama", 18, "balanced"), ("mistral", 30, ringray.deal(29, size)),
    ):  # fmt: skip
        ids = prompts(length)
        scores: dict[str, Any] = {"output_scores": True, "return_dict_in_generate": True}
        options = {"do_sample": False, "max_new_tokens": NEW, **scores}
        want = tiny("sdpa", family).eval().generate(ids, **options)  # type: ignore[operator]
        mine: Any = tiny("ringray", family).eval()
        mine.generation_config.use_cache = False  # as configs of trainings say
        got = hf.generate(mine, ids, partition=partition, **options)
        assert torch.equal(got.sequences, want.sequences), family
        assert len(got.scores) == len(want.scores) == NEW
        for mine, theirs in zip(got.scores, want.scores, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "": (transformers.Gemma2Config, {"sliding_window": 7, "head_dim": 16}),  # soft caps
    " ": (  # sinks
        transformers.GptOssConfig,
        {"sliding_window": 7, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "attends with a cache to other keys": (  # latent vectors in place of keys
        transformers.DeepseekV3Config,
        {
            "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
            "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 12, "moe_intermediate_size": 32,
        },
    ),
    "tokens reach others without the ring": (transformers.MambaConfig, {}),
}  # fmt: skip


def classes_are_right_or_refused(rank: int, size: int) -> None:
    """Other attention is computed as in one process, or the first call says why not."""
    ids = prompts()
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    for says, (config, changes) in CLASSES.items():
        models = []
        for attention_of in ("eager", "ringray"):
            torch.manual_seed(0)
            made = transformers.AutoModelForCausalLM.from_config(
                config(**{**TINY, **changes}), attn_implementation=attention_of
            )
            models.append(made.eval())
        if says.strip():
            with pytest.raises(ValueError, match=says):
                hf.generate(models[1], ids, **options)
            continue
        want = models[0].generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert torch.equal(hf.generate(models[1], ids, **options), want), config


def shards_stay_shards(rank: int, size: int) -> None:
    """A rank keeps its share of keys and values."""
    model = tiny("ringray").eval()
    out = hf.generate(
        model, prompts(25), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
    )
    assert len(out.past_key_values.layers) == 2
    for layer in out.past_key_values.layers:
        assert layer.get_seq_length() == 25 + NEW - 1
        assert abs(layer._held.rows - (25 + NEW - 1) / size) <= 2
        assert layer._held.k.shape[2] == layer._held.rows


def samples_alike(rank: int, size: int) -> None:
    """Ranks with one seed draw the same; others learn that they do not."""
    model, ids = tiny("ringray").eval(), prompts()
    torch.manual_seed(1)
    drawn = hf.generate(model, ids, max_new_tokens=NEW, do_sample=True, temperature=3.0)
    everyone = [torch.empty_like(drawn) for _ in range(size)]
    dist.all_gather(everyone, drawn)
    assert all(torch.equal(one, drawn) for one in everyone)
    torch.manual_seed(rank)
    if size > 1:
        with pytest.raises(ValueError, match=r"a step of generate: ranks disagree.*input_ids"):
            hf.generate(model, ids, max_new_tokens=NEW, do_sample=True, temperature=3.0)


def refused(rank: int, size: int) -> None:
    """Errors on every rank, after which the ring goes on."""
    model, ids = tiny("ringray").eval(), prompts()
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    wrong: dict[str, Callable[[], object]] = {
        "num_beams: got 4 sequences": lambda: hf.generate(model, ids, num_beams=2, **options),
        "attention_mask: it masks": lambda: hf.generate(
            model, ids, attention_mask=padded, **options
        ),
        "expected .B, S. with S >= 2": lambda: hf.generate(model, ids[:, :1], **options),
        "max_new_tokens: got 0": lambda: hf.generate(model, ids, max_new_tokens=0),
        "ring: LlamaAttention got NoneType": lambda: model.generate(ids, **options),  # type: ignore[operator]
    }
    for says, call in wrong.items():
        with pytest.raises(ValueError, match=says):
            call()
    if size > 1:
        with pytest.raises(ValueError, match="input_ids: "):
            hf.generate(model, prompts(seed=rank), **options)
    hf.generate(model, ids, **options)


def other_steps_are_refused(rank: int, size: int) -> None:
    """A model that computes something else with a cache is found, at its first call."""

    def double(*args: Any, **kwargs: Any) -> Any:
        return 2 * ring_decode(*args, **kwargs)  # type: ignore[operator]

    model = tiny("ringray").eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ring_decode", double)
        with pytest.raises(ValueError, match=r"computes other logits .* in steps with a cache"):
            hf.generate(model, prompts(), max_new_tokens=1)
        patch.setattr(hf.cache.RingCache, "get_mask_sizes", None)
        with pytest.raises(ValueError, match="does not step with the cache of a ring: TypeError"):
            hf.generate(model, prompts(), max_new_tokens=1)


@pytest.mark.parametrize("size", [*exhaustive(1, 2), 3])
def test_rings(size: int) -> None:
    on_ring(size, (right, shards_stay_shards, samples_alike, refused, other_steps_are_refused))


def test_other_classes() -> None:
    on_ring(2, (classes_are_right_or_refused,))
