"""Checks of every rank of a real ring: Hugging Face models beside their own SDPA."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import ringray
import ringray.models.huggingface as hf
import ringray.nn
from ringray import partition as partitions
from ringray_kernels import testing

VOCABULARY = 97
SEQ_LEN = 61  # odd: every ring of more than one rank holds padding
CUTS = (0, 9, 30, SEQ_LEN)
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

hf.register()


def tiny(attention: str, family: str = "llama", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny model with the same weights in every process, rounded to ``dtype``."""
    torch.manual_seed(0)
    make = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}[family]
    config = make(**TINY, **({"sliding_window": 7} if family == "mistral" else {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert type(model).__module__.startswith("transformers.")  # unmodified
    return model.to(dtype)


def tokens(batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Input ids and labels (batch, SEQ_LEN); some labels are ignored, unevenly."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, SEQ_LEN), generator=generator)
    labels = ids.clone()
    labels[:, :20] = -100
    labels[0, 40:43] = -100
    return ids, labels


def ring_sum(x: Tensor) -> Tensor:
    """``x`` in fp32, summed over all ranks."""
    total = x.detach().float().clone()
    dist.all_reduce(total)
    return total


def sum_gradients(model: nn.Module) -> None:
    """Over all ranks, in one message."""
    parameters = list(model.parameters())
    total = ring_sum(torch.cat([p.grad.float().flatten() for p in parameters]))
    for p, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p).to(p.dtype)


def sdpa(model: nn.Module, **more: Any) -> dict[str, Tensor]:
    """Logits, loss and gradients of one process with the whole sequence."""
    ids, labels = tokens()
    out = model(input_ids=ids, labels=labels, use_cache=False, **more)
    out.loss.backward()
    return {"logits": out.logits.detach(), "loss": out.loss.detach()} | {
        name: p.grad for name, p in model.named_parameters()
    }


def ring(model: nn.Module, **sharding: Any) -> dict[str, Tensor]:
    """The same from the ring: logits put together, losses and gradients summed."""
    ids, labels = tokens()
    batch = hf.shard_batch(model, ids, labels=labels, **sharding)
    out = model(**batch)
    out.loss.backward()
    partition = batch["ring"].partition
    logits = ringray.unshard(out.logits.detach(), dim=1, partition=partition, seq_len=SEQ_LEN)
    sum_gradients(model)
    return {"logits": logits, "loss": ring_sum(out.loss)} | {
        name: p.grad for name, p in model.named_parameters()
    }


def error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference, relative to ``want``."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def in_half_precision(rank: int, size: int) -> None:
    """bf16, by the model's dtype and by autocast: at most twice SDPA's error against fp64."""
    half = torch.bfloat16
    true = sdpa(tiny("sdpa", dtype=half).double())
    want, got = sdpa(tiny("sdpa", dtype=half)), ring(tiny("ringray", dtype=half))
    within_twice(got, want, true)

    true = sdpa(tiny("sdpa").double())
    with torch.autocast("cpu", half):
        want, got = sdpa(tiny("sdpa")), ring(tiny("ringray"))
    within_twice(got, want, true)


def within_twice(got: dict[str, Tensor], want: dict[str, Tensor], true: dict[str, Tensor]) -> None:
    for name, x in true.items():
        mine, theirs = error(got[name], x), error(want[name], x)
        # Single numbers round to anything, SDPA's to the right one at times.
        floor = 1e-2 if name == "loss" else 1e-6
        assert mine <= 2 * theirs + floor, f"{name}: {mine:.2e}, SDPA {theirs:.2e}"


def packed_by_row(rank: int, size: int) -> None:
    """Documents that begin at other tokens in each batch row."""
    ids, labels = tokens()
    positions = torch.stack([torch.arange(SEQ_LEN) % 40, torch.arange(SEQ_LEN)])
    want = tiny("sdpa")(input_ids=ids, position_ids=positions, use_cache=False).logits.detach()
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    shifted[0, 39] = -100
    loss = torch.nn.functional.cross_entropy(want.flatten(0, 1), shifted.flatten())
    for how in ({"position_ids": positions}, {"cu_seqlens": [[0, 40, SEQ_LEN], [0, SEQ_LEN]]}):
        got = ring(tiny("ringray"), **how)
        assert error(got["logits"], want) < 1e-5
        assert error(got["loss"], loss) < 1e-5


def dealt(rank: int, size: int) -> None:
    """A batch dealt by the adapter, or by its caller; a window of the model hides more."""
    cu = torch.tensor(CUTS)
    caller = ringray.deal(SEQ_LEN, size, cu_seqlens=cu)
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(CUTS)])[None]
    for family, partition in (("llama", "balanced"), ("llama", caller), ("mistral", caller)):
        want = sdpa(tiny("sdpa", family), position_ids=positions)["logits"]
        got = ring(tiny("ringray", family), cu_seqlens=cu, partition=partition)
        assert error(got["logits"], want) < 1e-5, (family, partition)
        usual = ring(tiny("ringray", family), cu_seqlens=cu)
        for name, x in usual.items():
            assert error(got[name], x) < 1e-4, (family, partition, name)
    with pytest.raises(
        ValueError, match=r"dealt for cu_seqlens \(0, 9, 30, 61\), but the call has"
    ):
        ring(tiny("ringray"), partition=caller)


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


def tiny_of_images(kind: str, attention: str) -> nn.Module:
    """Makes a tiny model of text and images: ``Qwen2VL``, ``Qwen2_5_VL`` or ``Qwen3VL``."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"depth": 1, "num_heads": 2, "hidden_size": 64, "embed_dim": 32}
    sizes |= {"out_hidden_size": 64, "intermediate_size": 32, "num_position_embeddings": 16}
    sizes |= {"deepstack_visual_indexes": [0]}
    text = {**TINY, "head_dim": 16, "rope_parameters": MROPE}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=sizes)
    for place, name in enumerate(("image", "video", "vision_start", "vision_end")):
        setattr(config, f"{name}_token_id", VOCABULARY - 1 - place)
    kinds = {"": attention, "text_config": attention, "vision_config": "sdpa"}
    return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=kinds)


def embeddings_of_images(rank: int, size: int) -> None:
    """Embeddings with three or four positions of each token: shards of positions and rotations to
    a bit, and logits, loss and gradients in fp32, as transformers' norms compute."""
    draw = torch.Generator().manual_seed(3)
    embeds = torch.randn(2, SEQ_LEN, TINY["hidden_size"], generator=draw)
    rows = torch.randint(0, 40, (3, 2, SEQ_LEN), generator=draw).sort(-1).values
    text = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(CUTS)]).expand(1, 2, -1)
    _, labels = tokens()
    kinds = itertools.cycle(("Qwen3VL", "Qwen2_5_VL", "Qwen2VL"))
    packed = torch.cat([text, rows])
    for kind, name, positions in zip(
        kinds, partitions.NAMES, (packed, rows, packed, rows, packed), strict=False
    ):
        cuts = torch.tensor(CUTS) if positions is packed else None
        partition = ringray.deal(SEQ_LEN, size, cu_seqlens=cuts) if name == "balanced" else name
        place: dict[str, Any] = {"partition": partition, "seq_len": SEQ_LEN}
        alone = tiny_of_images(kind, "sdpa")
        whole = embeds.clone().requires_grad_()
        # Its own loss would let the end of a document predict the next one's first token.
        logits = alone(inputs_embeds=whole, position_ids=positions, use_cache=False).logits
        shifted = ringray.nn.next_token_labels(labels, cuts)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())
        loss.backward()
        model, mine = tiny_of_images(kind, "ringray"), embeds.clone().requires_grad_()
        batch = hf.shard_batch(
            model, inputs_embeds=mine, position_ids=positions, labels=labels, partition=partition
        )
        own = ringray.local_positions(partition, SEQ_LEN, size, rank)
        real = own < SEQ_LEN
        assert torch.equal(batch["position_ids"][..., real], positions[..., own[real]])
        assert torch.equal(batch["inputs_embeds"][:, real], embeds[:, own[real]])
        rotate = model.model.language_model.rotary_emb
        for part, full in zip(
            rotate(embeds, batch["position_ids"][-3:]), rotate(embeds, rows), strict=True
        ):
            assert torch.equal(part[:, real], full[:, own[real]]), (kind, partition)
        out = model(**batch)
        out.loss.backward()
        sum_gradients(model.model.language_model.layers)
        got = ringray.unshard(out.logits.detach(), dim=1, **place)
        assert error(got, logits.detach()) < 1e-5, (kind, partition)
        assert error(ring_sum(out.loss), loss.detach()) < 1e-5
        assert error(ring_sum(mine.grad), whole.grad) < 1e-4
        wanted = dict(alone.named_parameters())
        for name, weight in model.model.language_model.layers.named_parameters():
            true = wanted[f"model.language_model.layers.{name}"].grad
            # A softmax does not see a bias of keys: its gradient is rounding.
            assert name.endswith("k_proj.bias") or error(weight.grad, true) < 1e-4, (kind, name)


def prefix(rank: int, size: int) -> None:
    """A prefix of each document, with the window of the model, as the dense mask says."""
    ids, _ = tokens()
    seen = testing.visible(
        SEQ_LEN, causal=True, window=6, prefix=(4, 0, 25), cu_seqlens=torch.tensor(CUTS)
    )
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(CUTS)])[None]
    dense = torch.zeros(SEQ_LEN, SEQ_LEN).masked_fill(~seen, -torch.inf)[None, None]
    with torch.no_grad():
        want = tiny("sdpa", "mistral")(
            input_ids=ids, position_ids=positions, attention_mask=dense, use_cache=False
        ).logits
    got = ring(tiny("ringray", "mistral"), cu_seqlens=torch.tensor(CUTS), prefix=[4, 0, 25])
    assert error(got["logits"], want) < 1e-5


def checkpointing(rank: int, size: int) -> None:
    """Recomputed layers take part in the ring again, with the same result to a bit."""
    want = ring(tiny("ringray").train())
    for reentrant in (False, True):
        model = tiny("ringray").train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        hf.shard_batch(model, tokens()[0])  # checks the model
        calls: list[None] = []
        layer = model.model.layers[0].self_attn
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        got = ring(model)
        assert len(calls) == 2  # forward, and once more
        assert all(torch.equal(got[name], x) for name, x in want.items())


def dropout(rank: int, size: int) -> None:
    """In training each layer drops the weights that it drops in one process."""
    model = tiny("ringray").train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    ids, labels = tokens()
    alone = [dist.new_group([one]) for one in range(size)][rank] if size > 1 else None
    found = []
    for group in (alone, None):
        batch = hf.shard_batch(model, ids, labels=labels, group=group)
        model.zero_grad()
        torch.manual_seed(1)
        out = model(**batch)
        out.loss.backward()
        logits = ringray.unshard(out.logits.detach(), dim=1, group=group, seq_len=SEQ_LEN)
        total = out.loss.detach()
        if group is None:
            sum_gradients(model)
            total = ring_sum(total)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append({"logits": logits, "loss": total} | gradients)
    for name, x in found[1].items():
        assert error(x, found[0][name]) < (1e-5 if name in ("logits", "loss") else 1e-4), name
    assert error(model.eval()(**batch).logits.detach(), out.logits.detach()) > 0.01


def without_causality(rank: int, size: int) -> None:
    """transformers' way of making an encoder of a decoder."""
    ids, _ = tokens()
    with torch.no_grad():
        want = tiny("sdpa")(input_ids=ids, is_causal=False, use_cache=False).logits
        model = tiny("ringray")
        logits = model(**hf.shard_batch(model, ids), is_causal=False).logits
    assert error(ringray.unshard(logits, dim=1, seq_len=SEQ_LEN), want) < 1e-5
