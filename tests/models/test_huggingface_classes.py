"""Every model class of the installed transformers on a ring: computed right, or refused.

``python -m tests.models.test_huggingface_classes 3`` writes the table of all classes, on a ring of
three processes.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ringray.models.huggingface as hf
from tests.support import huggingface_zoo as zoo
from tests.support.huggingface_checks import SEQ_LEN, tiny, tokens
from tests.support.huggingface_zoo import Case, Row
from tests.support.ranks import on_ring

PART = 16  # cases of one test


def rows(chosen: Sequence[Case], size: int = 2) -> list[Row]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        on_ring(size, [partial(zoo.table, chosen=chosen, path=path)])
        return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(-(-len(zoo.cases()) // PART)))
def test_no_class_computes_something_else(part: int) -> None:
    for row in rows(zoo.cases()[part * PART :][:PART]):
        assert row.verdict != "WRONG", row


CAPPED = {"attn_logit_softcapping": 0.1, "query_pre_attn_scalar": 1}  # that change every score
RIGHT = [
    Case("causal", "llama", "LlamaForCausalLM", {}, {"partition": "striped"}),
    Case("causal", "mistral", "MistralForCausalLM"),  # a window of keys
    Case("causal", "phi3", "Phi3ForCausalLM", zoo.LONG, {"gradients": "mean"}),
    Case("causal", "llama", "LlamaForCausalLM", zoo.DYNAMIC, {"partition": "contiguous"}),
    Case(
        "causal", "deepseek_v2", "DeepseekV2ForCausalLM", {"num_experts_per_tok": 2}
    ),  # values narrower than keys
    Case("causal", "gemma2", "Gemma2ForCausalLM", CAPPED),
    Case("causal", "gpt_oss", "GptOssForCausalLM", {}, {"gradients": "mean"}),
    Case("causal", "stablelm", "StableLmForCausalLM"),  # its layers do not pass the ring on
    Case("causal", "olmoe", "OlmoeForCausalLM", zoo.ROUTED, {"gradients": "mean"}),
    Case(
        "causal", "llama4_text", "Llama4ForCausalLM", {"floor_scale": 4, "no_rope_layers": [1, 0]}
    ),
    Case("causal", "opt", "OPTForCausalLM", {"layerdrop": 0.5}),
    Case("masked", "modernbert", "ModernBertForMaskedLM"),
    Case("sequence", "llama", "LlamaForSequenceClassification", {}, {"gradients": "mean"}),
    Case("sequence", "bert", "BertForSequenceClassification", {"num_labels": 1}),
    Case("token", "bert", "BertForTokenClassification"),
    Case("question", "llama", "LlamaForQuestionAnswering"),
]
REFUSED = [
    (Case("causal", "lfm2", "Lfm2ForCausalLM"), "conv.* tokens reach others without the ring"),
    (Case("causal", "bloom", "BloomForCausalLM"), "self_attention.* without the ring"),
    (Case("causal", "opt", "OPTForCausalLM", {"num_hidden_layers": 0}), "no layer calls the ring"),
    (Case("causal", "bart", "BartForCausalLM"), "computes other logits on a ring than in one"),
    (Case("sequence", "eurobert", "EuroBertForSequenceClassification"), "not come from one token"),
    (Case("token", "t5", "T5ForTokenClassification"), "position_bias: got Tensor"),
]


def test_what_a_ring_computes() -> None:
    for row in rows(RIGHT):
        assert (row.verdict, row.why) == ("right", ""), row


def test_what_a_ring_refuses() -> None:
    found = rows([case for case, _ in REFUSED])
    assert [row.verdict for row in found] == ["refused"] * len(found), found
    for row, (_, says) in zip(found, REFUSED, strict=True):
        assert re.search(says, row.why), row


# Models that are right but for one layer


class Shift(nn.Module):
    """Adds the token before, by a gate that begins closed."""

    def __init__(self, around: nn.Module) -> None:
        super().__init__()
        self.around, self.gate = around, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x) + self.gate * x.roll(1, dims=1)


class Normalised(nn.Module):
    """Normalises over the tokens of a batch, in training."""

    def __init__(self, around: nn.Module) -> None:
        super().__init__()
        self.around, self.norm = around, nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.around(x).transpose(1, 2)).transpose(1, 2)


class Own(nn.Module):
    """Attends by itself, to what it sees."""

    def __init__(self, around: nn.Module) -> None:
        super().__init__()
        self.around = around

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        q = k = v = hidden_states.unflatten(-1, (4, 16)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2), None


def altered(name: str) -> nn.Module:
    model: Any = tiny("ringray")
    layer = model.model.layers[1]
    if name == "Own":
        layer.self_attn = Own(layer.self_attn)
    else:
        layer.mlp = globals()[name](layer.mlp)
    return model


ALTERED = {
    "Shift": "in model.layers.1.mlp .Shift. tokens reach others without the ring",
    "Own": "in model.layers.1.self_attn .Own. tokens",
    "Normalised": "BatchNorm",
}


def refuses_altered(rank: int, size: int) -> None:
    batch = hf.shard_batch(tiny("ringray"), tokens()[0])
    for name, says in ALTERED.items():
        model = altered(name)
        with pytest.raises(ValueError, match=says):
            hf.shard_batch(model, tokens()[0])
        with pytest.raises(ValueError, match="is refused, or not checked"):
            model(**batch)


def refuses_other_tokens(rank: int, size: int) -> None:
    """Ranks that load other data, or one of which has a mistake, all hear of it."""
    ids, labels = tokens()
    with pytest.raises(ValueError, match=r"shard_batch: ranks disagree .* input_ids"):
        hf.shard_batch(tiny("ringray"), tokens(seed=rank)[0])
    with pytest.raises(ValueError, match=r"shard_batch: ranks disagree .* labels"):
        hf.shard_batch(tiny("ringray"), ids, labels=labels.roll(rank, dims=1))
    with pytest.raises(ValueError, match=r"attends by 'sdpa'|shard_batch: rank 1 is ready"):
        hf.shard_batch(tiny("ringray" if rank else "sdpa"), ids)


def refuses_other_weights(rank: int, size: int) -> None:
    model = tiny("ringray")
    with torch.no_grad():
        model.lm_head.weight.add_(rank)
    with pytest.raises(ValueError, match="the same weights on all ranks"):
        hf.shard_batch(model, tokens()[0])


def refuses_skipped_layers(rank: int, size: int) -> None:
    """A layer that one rank leaves out is an error on both, not a hang."""
    model = zoo.build("opt", "OPTForCausalLM", "ringray", layerdrop=0.5).train()
    batch = hf.shard_batch(model, tokens()[0])
    torch.manual_seed(rank)
    for _ in range(4):
        with pytest.raises(ValueError, match=r"attended \d times by the ring|were refused"):
            several(model, batch)
        dist.barrier()


def several(model: nn.Module, batch: dict[str, Any]) -> None:
    for _ in range(50):
        model(**batch)


def test_models_with_one_other_layer() -> None:
    checks = refuses_altered, refuses_other_tokens, refuses_other_weights, refuses_skipped_layers
    on_ring(2, checks)


# In one process, without a group


def test_labels_of_another_kind_are_refused() -> None:
    ids, labels = tokens()
    model = tiny("ringray")
    batch = hf.shard_batch(model, ids)
    with pytest.raises(ValueError, match="labels: got them without num_items_in_batch and shift_"):
        model(**batch, labels=batch["input_ids"])
    whole = hf.shard_batch(model, ids, labels=labels) | {"labels": labels}
    with pytest.raises(ValueError, match=r"labels: got .*\(2, 61\) for a shard \(2, 62\)"):
        model(**whole)
    with pytest.raises(ValueError, match=r"start_positions: got .* no other tensor is dealt"):
        model(**batch, start_positions=torch.tensor([1, 2]))
    question = zoo.build("llama", "LlamaForQuestionAnswering", "ringray")
    with pytest.raises(ValueError, match="labels: the model's forward takes none"):
        hf.shard_batch(question, ids, labels=labels)


def test_padding_before_a_pooled_token_is_refused() -> None:
    model = zoo.build("llama", "LlamaForSequenceClassification", "ringray")
    ids = torch.full((2, SEQ_LEN), 5)
    ids[:, 3] = zoo.PAD
    with pytest.raises(ValueError, match=r"input_ids: token 1 .pad_token_id. stands before"):
        hf.shard_batch(model, ids)


def test_a_ring_made_by_hand_needs_a_check() -> None:
    model, ids = tiny("ringray"), tokens()[0]
    ring = hf.Ring(SEQ_LEN, partition="contiguous")
    given = {"input_ids": ids, "position_ids": torch.arange(SEQ_LEN)[None], "ring": ring}
    with pytest.raises(ValueError, match="is not of a checked model; call check"):
        model(**given, use_cache=False)
    hf.check(model, ring)
    assert model(**given, use_cache=False).logits.shape == (2, SEQ_LEN, 97)


def test_the_config_stays_as_it_was() -> None:
    model = zoo.build("bert", "BertForSequenceClassification", "ringray").train()
    before = model.config.to_json_string()
    hf.shard_batch(model, tokens()[0])
    assert model.config.to_json_string() == before
    assert model.training
    assert model.config._attn_implementation == "ringray"


def main(size: int) -> None:
    outcomes = rows(zoo.cases(), size)
    for row in sorted(outcomes, key=lambda row: (row.verdict, row.case)):
        numbers = f"{row.logits:.0e} {row.loss or 0:.0e} {row.gradient:.0e}"
        right = numbers if row.verdict in ("right", "WRONG") else ""
        print(f"{row.case} | {row.verdict} {right} | {row.why}")
    print(Counter(row.verdict for row in outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
