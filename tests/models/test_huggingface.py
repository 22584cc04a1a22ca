"""Hugging Face models on real rings of gloo processes, and what the adapter refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import ringray.models.huggingface as hf
from tests.support import huggingface_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.huggingface_checks import SEQ_LEN, TINY, tiny, tokens
from tests.support.ranks import on_ring

CHECKS = (
    checks.packed_by_row, checks.prefix, checks.checkpointing, checks.without_causality,
    checks.dropout, checks.dealt, checks.embeddings_of_images,
)  # fmt: skip


@pytest.mark.parametrize("size", [2, *exhaustive(1, 4)])
def test_rings(size: int) -> None:
    on_ring(size, CHECKS)


@pytest.mark.slow
def test_half_precision() -> None:
    on_ring(2, (checks.in_half_precision,))


# In one process, without a group


def test_a_batch_lies_as_its_tokens() -> None:
    ids, labels = tokens()
    batch = hf.shard_batch(
        tiny("ringray"), ids, labels=labels, cu_seqlens=torch.tensor([0, 9, 9, 30, SEQ_LEN])
    )
    assert {name for name, x in batch.items() if isinstance(x, torch.Tensor)} == {
        "input_ids", "position_ids", "labels", "shift_labels", "num_items_in_batch"
    }  # fmt: skip
    assert batch["input_ids"].shape == (2, SEQ_LEN + 1)  # zigzag deals an even number of tokens
    assert torch.equal(batch["input_ids"][:, :SEQ_LEN], ids)
    assert batch["position_ids"][0, 7:11].tolist() == [7, 8, 0, 1]
    assert batch["shift_labels"][1, 28:31].tolist() == [labels[1, 29], -100, labels[1, 31]]
    assert (batch["shift_labels"][:, SEQ_LEN - 1 :] == -100).all()
    assert batch["num_items_in_batch"] == (batch["shift_labels"] != -100).sum()
    assert batch["ring"] == hf.Ring(SEQ_LEN, (0, 9, 9, 30, SEQ_LEN))
    without_mask = hf.shard_batch(tiny("ringray"), ids, attention_mask=torch.ones_like(ids))
    assert set(without_mask) == {
        "input_ids",
        "position_ids",
        "use_cache",
        "ring",
    }


def test_a_batch_without_labels_has_no_nan() -> None:
    ids, labels = tokens()
    model = tiny("ringray")
    batch = hf.shard_batch(model, ids, labels=torch.full_like(labels, -100))
    assert model(**batch).loss == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"input_ids": torch.zeros(3)}, r"input_ids: got torch.float32 of shape \(3,\)"),
        ({"labels": torch.zeros(2, 5)}, r"labels: got torch.float32 of shape \(2, 5\)"),
        ({"position_ids": torch.zeros(5)}, r"position_ids: got .*\(5,\), expected .*\(61,\)"),
        ({"gradients": "max"}, "gradients: got 'max', expected 'sum' or 'mean'"),
        ({"cu_seqlens": torch.tensor([0, 60])}, "cu_seqlens: expected boundaries from 0 to"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask: got .* expected \(2, 61\)"),
        (
            {"attention_mask": torch.arange(SEQ_LEN).expand(2, -1)},
            "attention_mask: it masks some tokens",
        ),
        ({"input_ids": None}, "input_ids: expected either input_ids or inputs_embeds"),
        ({"inputs_embeds": torch.zeros(2, SEQ_LEN, 64)}, "input_ids: expected either"),
        (
            {"input_ids": None, "inputs_embeds": torch.zeros(2, SEQ_LEN)},
            r"inputs_embeds: got torch.float32 of shape \(2, 61\), expected numbers \(B, S, H\)",
        ),
        ({"position_ids": torch.zeros(2, 2, SEQ_LEN)}, r"position_ids: got .*or \(4, 2, 61\)"),
        (
            {"position_ids": torch.zeros(3, 2, SEQ_LEN).long()},
            r"LlamaForCausalLM does not run on a shard with position_ids of three rows",
        ),
        ({"prefix": [3, 4]}, "prefix: got .* one for all documents or one for each of 1"),
    ],
)
def test_wrong_batches_are_told(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hf.shard_batch(tiny("ringray"), **{"input_ids": tokens()[0], **changes})


def test_a_model_that_would_attend_locally_is_told() -> None:
    """It would train, on attention within each shard, and nobody would notice."""
    ids, _ = tokens()
    with pytest.raises(ValueError, match="model: attends by 'sdpa', expected 'ringray'"):
        hf.shard_batch(tiny("sdpa"), ids)
    config, make = transformers.LlamaConfig(**TINY), transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="ringray")
    hf.shard_batch(model, ids)
    make(config, attn_implementation="sdpa")  # transformers changes the config that both share
    with pytest.raises(ValueError, match="from a config that no other model shares"):
        hf.shard_batch(model, ids)
    with pytest.raises(ValueError, match="model: attends by None"):
        hf.shard_batch(torch.nn.Linear(1, 1), ids)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ring": None}, "ring: LlamaAttention got NoneType, expected a Ring"),
        ({"use_cache": True}, "use_cache: got bool, expected None: a ring keeps no KV cache"),
        ({"attention_mask": torch.ones(2, 62)}, "attention_mask: .* shard_batch takes the mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 62])}, "cu_seq_lens_q: .* give cu_seqlens to"),
    ],
)
def test_what_a_ring_cannot_compute_is_refused(changes: dict[str, Any], says: str) -> None:
    model = tiny("ringray")
    batch = hf.shard_batch(model, tokens()[0])
    with pytest.raises(ValueError, match=says):
        model(**{**batch, **changes})


def test_a_cache_of_keys_is_refused() -> None:
    ids, _ = tokens()
    cache = transformers.DynamicCache()
    tiny("sdpa")(input_ids=ids, past_key_values=cache, use_cache=True)
    model = tiny("ringray")
    with pytest.raises(ValueError, match="past_key_values: 61 keys before this call's 62"):
        model(**hf.shard_batch(model, ids), past_key_values=cache)
