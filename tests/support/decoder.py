"""A small decoder over a sharded sequence, and its training: on a ring, and by one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringray
from ringray.nn import next_token_labels

VOCABULARY, HIDDEN = 31, 32
SEQ_LEN = 61
DOCUMENTS = (0, 5, 5, 30, 61)


class Block(nn.Module):
    def __init__(self, **attention: Any) -> None:
        super().__init__()
        self.before = nn.RMSNorm(HIDDEN)
        self.attention = ringray.ContextParallelAttention(HIDDEN, 4, num_kv_heads=2, **attention)
        self.mlp = nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.SiLU())

    def forward(self, x: Tensor, **where: Any) -> Tensor:
        x = x + self.attention(self.before(x), **where)
        return x + self.mlp(x)


class Decoder(nn.Module):
    """``checkpointed``: options of each layer's checkpoint; None without one."""

    def __init__(self, *, checkpointed: dict[str, Any] | None = None, **attention: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([Block(**attention) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, **where: Any) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if self.checkpointed is not None:
                x = checkpoint(block, x, use_reentrant=False, **self.checkpointed, **where)
            else:
                x = block(x, **where)
        return self.head(x)


@dataclass(frozen=True)
class Text:
    """A batch that every rank holds. Labels after ``labelled`` are ignored: uneven over ranks."""

    batch: int = 2
    documents: tuple[int, ...] | None = DOCUMENTS
    labelled: int = 40
    first: int = 0  # of the batch rows, which are the same whatever the batch

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.documents is None else torch.tensor(self.documents)

    @property
    def ids(self) -> Tensor:
        rng = torch.Generator().manual_seed(1)
        everything = torch.randint(0, VOCABULARY, (4, SEQ_LEN), generator=rng)
        return everything[self.first : self.first + self.batch]

    @property
    def labels(self) -> Tensor:
        labels = next_token_labels(self.ids, self.cu_seqlens)
        labels[:, self.labelled :] = -100
        # The batch rows differ in how many labels they have, too.
        for row in range(self.batch):
            labels[row, : 9 * (row + self.first)] = -100
        return labels


@dataclass
class Trainer:
    """Trains on ``text``; ``group`` is the ring, ``loss_group`` all ranks with tokens of a step."""

    model: nn.Module
    text: Text = field(default_factory=Text)
    group: dist.ProcessGroup | None = None
    loss_group: dist.ProcessGroup | None = None
    partition: str = "zigzag"
    gradients: str = "sum"
    after_backward: Callable[[nn.Module], None] = lambda model: None

    def backward(self) -> Tensor:
        """One forward and backward; the loss."""
        more: dict[str, Any] = {"dim": 1, "partition": self.partition, "group": self.group}
        ids = ringray.shard(self.text.ids, **more)
        labels = ringray.shard(self.text.labels, pad_value=-100, **more)
        logits = self.model(ids, seq_len=SEQ_LEN, cu_seqlens=self.text.cu_seqlens)
        loss = ringray.sharded_cross_entropy(
            logits, labels, group=self.loss_group,
            gradients=self.gradients,  # type: ignore[arg-type]
        )  # fmt: skip
        loss.backward()
        self.after_backward(self.model)
        return loss.detach()

    def curve(self, steps: int = 4) -> list[float]:
        """Losses of a few steps of SGD."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        losses = []
        for _ in range(steps):
            losses.append(self.backward().item())
            optimizer.step()
            optimizer.zero_grad()
        return losses


def alone() -> dist.ProcessGroup:
    """A group of this rank only. All ranks call it at the same point."""
    return _alone_in(dist.group.WORLD)


@lru_cache(maxsize=1)
def _alone_in(ring: dist.ProcessGroup) -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def twin_alone(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose ring is this process."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, ringray.ContextParallelAttention):
            module.group = alone()
    return twin


def trainer_alone(model: nn.Module, text: Text | None = None) -> Trainer:
    """Trains a copy of ``model`` on the whole of ``text`` in this process."""
    return Trainer(twin_alone(model), text or Text(), group=alone(), loss_group=alone())


def sum_gradients(model: nn.Module) -> None:
    """Sums gradients over the ring, as is needed without a wrapper."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name, however they are sharded or wrapped."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name.removeprefix("module.")] = whole
    return found


def same(got: Tensor, want: Tensor, name: object, within: float = 1e-5) -> None:
    """Equal but for fp32 rounding, relative to the whole tensor."""
    assert got.shape == want.shape, (name, got.shape, want.shape)
    error = ((got - want).norm() / want.norm()).item()
    assert error <= within, f"{name}: relative error {error:.2e}"  # NaN is not <=


def same_gradients(got: nn.Module, want: nn.Module) -> None:
    theirs = gradients(want)
    mine = gradients(got)
    assert mine.keys() == theirs.keys()
    for name, grad in mine.items():
        same(grad, theirs[name], name)
