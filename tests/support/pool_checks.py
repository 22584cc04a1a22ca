"""Checks of every rank of a pool: it trains as DP x CP does with the same tokens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringray.attention.agreement import RefusedError
from ringray.attention.sharding import local_positions
from ringray.partition import BALANCED
from ringray.training import mesh as meshes
from ringray.training.checkpoint import Checkpoints
from ringray.training.corpus import NO_LABEL, Corpus, CorpusError, Ints, RandomTokens, SequenceRows
from ringray.training.recipe import Degrees, Recipe
from ringray.training.tasks import Retrieval, Task
from ringray.training.trainer import Trainer
from ringray.verification.double import in_double
from tests.support.training_checks import TEXT, TINY

Source = Corpus | RandomTokens | Task

SEQ_LEN = 126
APART, TOGETHER = Degrees(dp=2, cp=2), Degrees(cp=4)
ALIKE: dict[str, Any] = {"seq_len": SEQ_LEN, "sequences": 4, "steps": 100, "mlp_rows": 16}


class InOrder(Corpus):
    """Documents in the order of their files."""

    def _order(self, epoch: int) -> tuple[Ints, Ints]:
        sizes = self._pieces[:, 2] - self._pieces[:, 1]
        return np.arange(len(sizes)), np.cumsum(sizes) - sizes


def write(folder: Path, sequences: int) -> None:
    """Writes text as documents of all lengths, of which none runs over the edge of a sequence."""
    text = np.frombuffer(b"".join(path.read_bytes() for path in TEXT), np.uint8)
    tokens = np.resize(text, sequences * SEQ_LEN).astype(np.uint16)
    inner = np.random.default_rng(0).integers(1, len(tokens), size=2 * sequences)
    edges = np.arange(1, sequences + 1) * SEQ_LEN
    np.save(folder / "t.npy", tokens)
    np.save(folder / "t.ends.npy", np.union1d(inner, edges))


def trainer(source: Source, degrees: Degrees, **changes: Any) -> Trainer:
    return Trainer(TINY, meshes.make_mesh(degrees), Recipe(**ALIKE | changes), source)


def losses(made: Trainer, steps: int) -> list[float]:
    return [made.step().loss for _ in range(steps)]


def losses_are_alike(folder: Path, steps: int, figures: Path, rank: int, size: int) -> None:
    """Those of DP x CP, of pools of some and of all sequences of a step."""
    want = losses(trainer(InOrder([folder]), APART), steps)
    assert want[-1] < want[0]
    for pool in (2, 4):
        made = losses(trainer(InOrder([folder]), TOGETHER, pool=pool), steps)
        assert made == pytest.approx(want, rel=1e-3)
        if rank == 0:
            worst = max(abs(a - b) / b for a, b in zip(made, want, strict=True))
            (figures / f"{pool}.txt").write_text(f"{worst:.2e}, {want[0]:.4f} to {want[-1]:.4f}")


def _gradients(made: Trainer) -> tuple[float, dict[str, Tensor]]:
    """Returns loss and gradients of a step."""
    every: dict[str, Tensor] = {}

    def clip() -> float:
        for name, weight in made.model.named_parameters():
            every[name] = weight.grad.full_tensor()  # type: ignore[union-attr]
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "_clip", clip)
        return made.step().loss, every


def a_step_in_double_is_alike(folder: Path, rank: int, size: int) -> None:
    """Loss and every gradient, of packed documents, sequences of a corpus as documents, random
    tokens with padding behind them, and a task."""
    cases: list[tuple[Source, dict[str, Any]]] = [
        (InOrder([folder]), {}), (Corpus(TEXT), {"documents": False}),
        (RandomTokens(TINY.vocab), {"seq_len": 125}), (Retrieval(), {}),
    ]  # fmt: skip
    with in_double():
        for source, changes in cases:
            want, gradients = _gradients(trainer(source, APART, **changes))
            loss, made = _gradients(trainer(source, TOGETHER, pool=2, **changes))
            assert loss == pytest.approx(want, rel=1e-12)
            for name, true in gradients.items():
                assert true.dtype == torch.float64
                assert (made[name] - true).norm() <= 1e-12 * true.norm(), (name, changes)


def documents_run_over_the_edges_of_sequences(folder: Path, rank: int, size: int) -> None:
    """A pool of two sequences is one of twice the length, its documents have their FLOPs; and it
    begins with any sequence."""
    corpus, length = Corpus([folder]), 2 * SEQ_LEN
    twice = trainer(corpus, Degrees(cp=size), seq_len=length, sequences=2)
    pool = trainer(corpus, Degrees(cp=size), pool=2)
    for _ in range(2):
        want, made = twice.step(), pool.step()
        assert made.loss == pytest.approx(want.loss, rel=2e-5)
        assert (made.flops, made.tokens) == (want.flops, want.tokens)
    rows = pool._joined(3)
    assert rows.partition is not None
    following = 1 + local_positions(rows.partition, length, size, rank).numpy()
    last, inner = rows.labels == NO_LABEL, following < length
    assert (last == np.isin(following, rows.ends))[inner].all()
    assert len(rows.ends) > 2


def goes_on_on_other_ranks(folder: Path, rank: int, size: int) -> None:
    """From a pool to DP x CP and back, and a training that has read ahead from its first step."""
    pool = trainer(InOrder([folder]), TOGETHER, pool=2)
    apart = trainer(InOrder([folder]), APART)
    larger = trainer(InOrder([folder]), TOGETHER, pool=4)
    checkpoints = Checkpoints(folder / "kept")
    losses(pool, 1)
    checkpoints.save(1, pool.model, pool.optimizer, pool.facts())
    checkpoints.wait()
    want = losses(pool, 2)
    for made in (apart, larger, pool):
        facts = checkpoints.load(made.model, made.optimizer)
        assert facts is not None
        made.resume(facts)
        assert losses(made, 2) == pytest.approx(want, rel=1e-3)


class Noting(RandomTokens):
    """Notes which sequences are read, and cannot read one of them."""

    def __init__(self, bad: int) -> None:
        super().__init__(TINY.vocab)
        self.bad, self.read, self.threads = bad, list[int](), set[int]()

    def rows(self, number: int, seq_len: int, positions: Ints) -> SequenceRows:
        self.read.append(number)
        self.threads.add(threading.get_ident())
        if number == self.bad:
            raise CorpusError("corpus: t.npy is gone")
        return super().rows(number, seq_len, positions)


def rows_are_read_ahead(rank: int, size: int) -> None:
    """A step reads the rows of the next one, whose errors are of that step, on every rank."""
    source = Noting(bad=5)
    made = trainer(source, Degrees(cp=size), pool=4, steps=2)
    made.step()
    (ahead,) = made._ahead.values()
    mine = ahead.exception() is not None
    assert threading.get_ident() not in source.threads
    assert {number // 4 for number in source.read} == {0, 1}
    for _ in range(2):
        error, says = (CorpusError, "t.npy is gone") if mine else (RefusedError, "were refused")
        with pytest.raises(error, match=says):
            made.step()
    assert made.done == 1
    source.bad = -1
    assert made.step().number == 2
    assert not made._ahead, "no step follows"
    counts = torch.tensor(int(mine))
    dist.all_reduce(counts)
    assert counts == 1, "a sequence is on one rank, which reads it alone"
    if size == 4:
        assert len({*source.read}) == 2


def each_sequence_is_dealt(rank: int, size: int) -> None:
    """The partition without a pool, and with ranks that split heads."""
    want = trainer(Corpus(TEXT), Degrees(cp=size)).step()
    made = trainer(Corpus(TEXT), Degrees(cp=size), partition=BALANCED).step()
    assert made.loss == pytest.approx(want.loss, rel=2e-5)
    made = trainer(Corpus(TEXT), Degrees(cp=size), pool=2, partition="striped").step()
    split = trainer(Corpus(TEXT), Degrees(cp=size // 2, tp=2), pool=2).step()
    assert split.loss == pytest.approx(made.loss, rel=2e-5)
