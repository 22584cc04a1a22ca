"""Checks of every rank of a training: the same losses on every mesh, checkpoints of any mesh."""

from __future__ import annotations

import json
import math
import re
import resource
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ringray
from ringray import partition as partitions
from ringray.comm.ring import timeout_of
from ringray.models.decoder import Decoder
from ringray.models.sizes import named
from ringray.nn import next_token_labels
from ringray.training import mesh as meshes
from ringray.training.checkpoint import CheckpointError, Checkpoints, complete
from ringray.training.corpus import NO_LABEL, Corpus, CorpusError, RandomTokens
from ringray.training.parallelize import parallelize
from ringray.training.recipe import Degrees, Recipe
from ringray.training.trainer import LossError, Trainer, TrainingStep
from tests.support.ranks import dealt

TINY = named("llama-tiny", {})
TEXT = [Path(__file__).parents[2] / "docs" / name for name in ("design.md", "models.md")]
RECIPE = Recipe(seq_len=126, sequences=4, steps=40, warmup=4, mlp_rows=16, loss_rows=16)


def trainer(degrees: Degrees, recipe: Recipe = RECIPE) -> Trainer:
    return Trainer(TINY, meshes.make_mesh(degrees), recipe, Corpus(TEXT))


def steps(made: Trainer, until: int) -> list[TrainingStep]:
    found = []
    while made.done < until:
        found.append(made.step())
    return found


def losses_are(
    wanted: list[TrainingStep], degrees: Degrees, recipe: Recipe, rank: int, size: int
) -> None:
    """Every mesh has the losses and norms of one process."""
    found = steps(trainer(degrees, recipe), len(wanted))
    for got, want in zip(found, wanted, strict=True):
        assert got.loss == pytest.approx(want.loss, rel=2e-5), got.number
        assert got.norm == pytest.approx(want.norm, rel=2e-3), got.number
        assert got.tokens == want.tokens


def the_first_step_holds_all(rank: int, size: int) -> None:
    """Fits in the second step what fits in the first: the optimizer's numbers are there."""
    made = trainer(Degrees(cp=2))

    def held() -> int:
        states = made.optimizer.state.values()
        return sum(x.numel() * x.element_size() for state in states for x in state.values())

    before = held()
    assert before >= 8 * TINY.parameters
    made.step()
    assert held() == before


def answers_are_whole(degrees: Degrees, recipe: Recipe, rank: int, size: int) -> None:
    """A mesh answers as a model that holds all rows, at any length."""
    made = Trainer(TINY, meshes.make_mesh(degrees), recipe, RandomTokens(TINY.vocab))
    alone = dist.new_group([rank], use_local_synchronization=True)
    whole = Decoder(TINY, group=alone)
    whole.reset(recipe.seed)
    for seq_len in (50, 142):
        tokens = np.random.default_rng(seq_len).integers(TINY.vocab, size=(3, seq_len))
        at = np.array([seq_len - 1, 7, 24])
        with torch.no_grad():
            logits = whole(torch.from_numpy(tokens))
        wanted = 100 + logits[:, at, 100:120].argmax(-1).numpy()
        assert (made.answers(tokens, at, range(100, 120)) == wanted).all()


def gradients_are(degrees: Degrees, options: dict[str, Any], rank: int, size: int) -> None:
    """Gradients of a decoder on a mesh are those of one process, odd lengths included, and so are
    those of documents that are dealt."""
    for partition in (partitions.DEFAULT, partitions.BALANCED):
        _gradients_are(degrees, options, rank, partition)


def _gradients_are(degrees: Degrees, options: dict[str, Any], rank: int, name: str) -> None:
    mesh, seq_len = meshes.make_mesh(degrees), 51
    cu_seqlens = None if name == partitions.DEFAULT else torch.tensor([0, 7, 40, 51])
    partition = dealt(name, seq_len, mesh.ring, cu_seqlens=cu_seqlens)
    alone = dist.new_group([rank], use_local_synchronization=True)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, TINY.vocab, (2 * degrees.dp, seq_len), generator=draw)
    labels = next_token_labels(ids, cu_seqlens)
    whole = Decoder(TINY, group=alone, loss_rows=None)
    rows: dict[str, Any] = {"cu_seqlens": cu_seqlens, "partition": "contiguous"}
    want = whole(ids, labels=labels, shards=alone, **rows)
    want.backward()
    made = Decoder(TINY, **options)
    parallelize(made, mesh)
    mine = slice(2 * mesh.place("dp"), 2 * mesh.place("dp") + 2)
    ring: dict[str, Any] = {"dim": 1, "group": mesh.ring, "partition": partition}
    x = ringray.shard(ids[mine], **ring)
    y = ringray.shard(labels[mine], pad_value=-100, **ring)
    where = {**rows, "seq_len": seq_len, "partition": partition}
    loss = made(x, labels=y, shards=mesh.shards.get_group(), gradients="mean", **where)
    loss.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    wanted = dict(whole.named_parameters())
    for name, weight in made.named_parameters():
        grad, true = weight.grad.full_tensor(), wanted[name].grad
        assert (grad - true).norm() <= 1e-5 * true.norm(), name
    with torch.no_grad():  # and logits without labels
        assert made(x, **where).shape == (*x.shape, TINY.vocab)


def saves(folder: Path, at: int, degrees: Degrees, rank: int, size: int) -> None:
    """Trains and saves behind a step, going on meanwhile."""
    made, kept = trainer(degrees), Checkpoints(folder, keep=1)
    for step in (at - 1, at):
        steps(made, step)
        kept.save(step, made.model, made.optimizer, made.facts())
    steps(made, at + 2)  # what is written is a copy
    kept.wait()
    dist.barrier()
    assert [one.name for one in complete(folder)] == [f"step-{at:08d}"]


def facts(folder: Path) -> dict[str, Any]:
    """Those of the newest checkpoint."""
    text = (complete(folder)[-1] / "facts.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def goes_on_behind_its_tokens(rank: int, size: int) -> None:
    """Another batch or length takes up where the data was left."""
    made = trainer(Degrees(cp=size))
    steps(made, 2)
    facts = {**made.facts(), "step": 2}
    for sequences, seq_len in ((2, 126), (4, 63), (4, 100)):
        other = trainer(Degrees(cp=size), replace(RECIPE, sequences=sequences, seq_len=seq_len))
        other.resume(facts)
        read: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(other, "_read", partial(_noting, read))
            with pytest.raises(StopIteration):
                other.step()
        assert read == [-(-2 * 4 * 126 // seq_len)]


def _noting(read: list[int], number: int, _: Any) -> None:
    read.append(number)
    raise StopIteration


def flops_are_of_visible_pairs(degrees: Degrees, rank: int, size: int) -> None:
    """Tokens of packed documents see their own."""
    recipe = replace(RECIPE, sequences=degrees.dp)
    found, seq_len = trainer(degrees, recipe).step(), recipe.seq_len
    corpus, at = Corpus(TEXT), np.arange(seq_len)
    sizes = [np.diff(corpus.rows(i, seq_len, at).ends) for i in range(recipe.sequences)]
    pairs = sum(int((one * (one + 1) // 2).sum()) for one in sizes)
    dense = recipe.sequences * seq_len * TINY.token_flops
    assert found.flops == pytest.approx(3 * (dense + TINY.attention_flops(pairs)), rel=1e-5)


def continues(
    folder: Path, wanted: list[TrainingStep], degrees: Degrees, rank: int, size: int
) -> None:
    """Goes on behind a checkpoint of another mesh as if nothing had happened."""
    made, kept = trainer(degrees), Checkpoints(folder)
    facts = kept.load(made.model, made.optimizer)
    made.resume(facts)
    found = steps(made, wanted[-1].number)
    later = wanted[-len(found) :]
    assert len(found) >= 3
    assert [step.number for step in found] == [step.number for step in later]
    for got, want in zip(found, later, strict=True):
        assert got.loss == pytest.approx(want.loss, rel=2e-5), got.number


def a_full_disk_is_told(folder: Path, rank: int, size: int) -> None:
    """A limit on the size of files stands for it; the checkpoint before is still there."""
    made = trainer(Degrees(cp=size))
    checkpoints = Checkpoints(folder)
    checkpoints.save(made.step().number, made.model, made.optimizer, made.facts())
    checkpoints.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        checkpoints.save(made.step().number, made.model, made.optimizer, made.facts())
        with pytest.raises(CheckpointError, match=r"iB free there: rank \d: "):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.name for one in complete(folder)] == ["step-00000001"]


def tokens_beyond_the_vocabulary_are_told(folder: Path, rank: int, size: int) -> None:
    corpus = Corpus([folder])
    assert corpus.vocabulary <= TINY.vocab, "only the begin of a file is looked at"
    mesh = meshes.make_mesh(Degrees(cp=size))
    made = Trainer(TINY, mesh, replace(RECIPE, seq_len=66_000, sequences=1), corpus)
    with pytest.raises(CorpusError, match="token 256 in sequence 0, expected 0 to 255"):
        made.step()


def a_bad_loss_changes_nothing(rank: int, size: int) -> None:
    made = trainer(Degrees(cp=size))
    steps(made, 2)
    before = whole(made)
    scale = made.model.norm.weight
    with torch.no_grad():
        kept = scale.detach().clone()
        scale.mul_(float("nan"))
    with pytest.raises(LossError, match=re.escape("step 3: the loss is nan")):
        made.step()
    with torch.no_grad():
        scale.copy_(kept)

    class Overflows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * math.inf

    hook = made.model.norm.register_forward_hook(lambda _, __, out: Overflows.apply(out))
    with pytest.raises(LossError, match="step 3: the norm of the gradients is"):
        made.step()
    hook.remove()
    assert made.done == 2
    assert all(weight.grad is None for weight in made.model.parameters())
    assert all(map(torch.equal, before, whole(made)))


def whole(made: Trainer) -> list[torch.Tensor]:
    """All weights, gathered."""
    weights = made.model.parameters()
    return [weight.full_tensor().clone() for weight in weights if isinstance(weight, DTensor)]


def the_loss_is_per_token(folder: Path, rank: int, size: int) -> None:
    """Sequences with few labels count less than those with many, on whatever replica."""
    recipe, corpus = replace(RECIPE, seq_len=50), Corpus([folder])
    alone = dist.new_group([rank], use_local_synchronization=True)
    model, total, labels = Decoder(TINY, group=alone), 0.0, []
    for number in range(recipe.sequences):
        rows = corpus.rows(number, recipe.seq_len, np.arange(recipe.seq_len))
        labels.append(int((rows.labels != NO_LABEL).sum()))
        ids, wanted = (torch.from_numpy(x)[None] for x in (rows.tokens, rows.labels))
        ends = torch.from_numpy(rows.ends)
        with torch.no_grad():
            loss = model(ids, labels=wanted, shards=alone, cu_seqlens=ends)
        total += loss.item() * labels[-1]
    assert max(labels) > 2 * min(labels)
    made = Trainer(TINY, meshes.make_mesh(Degrees(dp=size)), recipe, corpus)
    assert made.step().loss == pytest.approx(total / sum(labels), rel=1e-6)


class Attends(torch.nn.Module):
    """A model with attention by the ring, or of its own."""

    def __init__(self, *, local: bool, words: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(words, 32)
        self.layer = torch.nn.TransformerEncoderLayer(32, 4, 32, batch_first=True)
        if not local:
            self.layer = ringray.ContextParallelAttention(32, 4)  # type: ignore[assignment]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(ids))


def local_attention_is_refused(rank: int, size: int) -> None:
    """On every rank, also where only the last one's model attends locally; the ring works on."""
    mesh, ids = meshes.make_mesh(), torch.ones(1, 8, dtype=torch.int64)
    for local in (True, rank == size - 1):
        with pytest.raises(ValueError, match=r"in layer.self_attn \(MultiheadAttention\) tokens"):
            parallelize(Attends(local=local), mesh)
    for others in (Attends(local=False), Attends(local=False, words=64 + (rank == size - 1))):
        if rank == size - 1:
            torch.nn.init.ones_(others.layer.q_proj.weight)  # type: ignore[union-attr, arg-type]
        with pytest.raises(ValueError, match=r"weights: .* torch.manual_seed"):
            parallelize(others, mesh)
    right = Attends(local=False)
    parallelize(right, mesh)
    right(ids).sum().backward()
    mesh = meshes.make_mesh(Degrees(dp=size))
    named = Attends(local=True)
    named.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"a": Attends(local=True)})])
    parallelize(named, mesh)
    for group in (mesh.ring, mesh.shards.get_group(), mesh.whole["tp"].get_group()):
        assert timeout_of(group) == timeout_of(dist.group.WORLD)
    replicas = parallelize(Attends(local=True), mesh)
    replicas(ids).sum().backward()  # of whole sequences


class OfOtherGroup(Attends):
    """A model that takes another ring than the mesh's."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(local=False)
        self.layer = torch.nn.Linear(32, 32)  # type: ignore[assignment]
        self.group = group

    def forward(self, ids: torch.Tensor) -> Any:
        q = self.layer(self.words(ids)).unflatten(-1, (4, 8)).transpose(1, 2)
        return ringray.ring_attention(q, q, q, group=self.group)


def other_groups_are_refused(rank: int, size: int) -> None:
    """Refuses all ranks, and as many as the mesh's ring has, but others of them."""
    mesh = meshes.make_mesh(dp=2)
    across = [dist.new_group([first, first + 2]) for first in range(2)][rank % 2]
    for group, ranks in ((None, "0, 1, 2, 3"), (across, "0, 2")):
        with pytest.raises(ValueError, match=rf"on the ring of ranks \[{ranks}\], .* \[0, 1\]"):
            parallelize(OfOtherGroup(group), mesh)


def models_of_transformers_attend_by_the_ring(rank: int, size: int) -> None:
    import transformers

    import ringray.models.huggingface as hf

    hf.register()
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    mesh, ids = meshes.make_mesh(), torch.arange(41)[None]
    for name, some in (("sdpa", "sdpa"), ("ringray", "eager"), ("ringray", "ringray")):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
        model.model.layers[1].self_attn.config = type(config)(**config.to_dict())
        model.model.layers[1].self_attn.config._attn_implementation = some
        if (name, some) != ("ringray", "ringray"):
            with pytest.raises(ValueError, match=r"attends by 'sdpa'|layers.1.self_attn"):
                parallelize(model, mesh)
            continue
        parallelize(model, mesh)
        batch = hf.shard_batch(model, ids, labels=ids, group=mesh.ring, gradients="mean")
        model(**batch).loss.backward()


def wrong_meshes_are_told(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"sequences = 3"):
        trainer(Degrees(dp=2), replace(RECIPE, sequences=3))
    mesh = meshes.make_mesh(Degrees(tp=2))
    with pytest.raises(ValueError, match="expected a divisor of kv_heads = 1"):
        parallelize(Decoder(replace(TINY, kv_heads=1)), mesh)
