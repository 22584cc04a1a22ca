"""Which layers of a model send their inputs away, and which are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

import ringray
from ringray.training.recipe import Degrees, Recipe, check
from tests.support import offload_checks as checks
from tests.support.offload_checks import RECIPE, SEQ_LEN, TINY, decoder, equal, gradients, loss


class Plain(torch.nn.Module):
    """A layer that is not checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(3, 5), torch.nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class HuggingFace(GradientCheckpointingLayer):
    """A layer that transformers checkpoint."""

    def __init__(self, on: bool = True) -> None:
        super().__init__()
        self.gradient_checkpointing = on
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        self.inner = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class OtherHuggingFace(HuggingFace):
    pass


class Experts(checks.Scaled):
    """A checkpointed layer with more experts than a model has layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(Plain() for _ in range(8))

    def _scaled(self, x: Tensor) -> Tensor:
        return sum((expert(x) for expert in self.experts), x * self.scale)


class Tower(torch.nn.Module):
    """A tower of layers before others."""

    def __init__(self, tower: list[torch.nn.Module], layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.vision, self.text = torch.nn.ModuleList(tower), checks.Stream(0)
        self.text.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.vision:
            x = layer(x)
        return self.text(x)


def tower(build: Callable[[], torch.nn.Module], layers: int, of: type[torch.nn.Module]) -> Tower:
    return Tower([build() for _ in range(layers)], [of() for _ in range(2)])


LAYERS = {
    "a tower that is not checkpointed": (lambda: tower(Plain, 3, HuggingFace), 2),
    "a tower whose checkpointing is off": (
        lambda: tower(partial(HuggingFace, on=False), 3, HuggingFace), 2,
    ),
    "a tower that is checkpointed, too": (
        lambda: tower(HuggingFace, 3, lambda: checkpoint_wrapper(Plain())), 5,
    ),
    "layers of two classes": (
        lambda: Tower([], [HuggingFace(), OtherHuggingFace(), HuggingFace()]), 3,
    ),
    "unknown layers of two classes": (lambda: Tower([], [Experts(), checks.Scaled()]), 2),
    "experts": (lambda: Tower([], [Experts(), Experts()]), 2),
    "a list with two names": (lambda: twice(Tower([], [Experts(), Experts()])), 2),
}  # fmt: skip


def twice(model: Tower) -> Tower:
    model.layers = model.text.layers
    return model


@pytest.mark.parametrize(("build", "sent"), LAYERS.values(), ids=LAYERS)
def test_the_layers_that_are_checkpointed_send_their_inputs(
    build: Callable[[], Tower], sent: int
) -> None:
    model = build()
    wanted, x = copy.deepcopy(model), torch.randn(2, 3, requires_grad=True)
    away = ringray.offload(model)
    out = model(x)
    assert away.bytes == sent * x.nbytes
    out.sum().backward()
    wanted(x).sum().backward()
    assert equal(gradients(model), gradients(wanted))


def test_a_caller_names_layers_where_it_is_not_clear() -> None:
    model, x = tower(checks.Scaled, 3, Experts), torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"several lists of layers: vision, text\.layers;"):
        ringray.offload(model)
    for wrong in ([], [Plain()]):
        with pytest.raises(ValueError, match="layers: expected modules of the Tower"):
            ringray.offload(model, layers=wrong)
    away = ringray.offload(model, layers=model.text.layers)
    out = model(x)
    assert away.bytes == 2 * x.nbytes
    out.sum().backward()
    with pytest.raises(ValueError, match=r"its 2 layers leave the device already \(text\.layers\)"):
        ringray.offload(model, layers=model.text.layers)
    ringray.offload(model, layers=model.vision)  # which left nothing before
    model = tower(Plain, 1, Plain)
    ringray.offload(model, layers=model.text.layers)
    with pytest.raises(ValueError, match=r"text\.layers\.0: a Plain keeps other tensors"):
        model(x)


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    """As other libraries replace them, before or later."""
    model, wanted = checks.Stream(2), checks.Stream(2)
    for stream in (model, wanted):
        stream.layers[0].forward = partial(doubled, stream.layers[0].forward)
    away = ringray.offload(model)
    for stream in (model, wanted):
        stream.layers[1].forward = partial(doubled, stream.layers[1].forward)
    x = torch.randn(2, 3)
    out = model(x)
    assert away.bytes == 2 * x.nbytes
    out.sum().backward()
    wanted(x).sum().backward()
    assert equal(gradients(model), gradients(wanted))


def doubled(forward: Any, x: Tensor) -> Tensor:
    return 2 * forward(x)


class Changing(checks.Scaled):
    """A layer that changes its input."""

    def _scaled(self, x: Tensor) -> Tensor:
        return super()._scaled(x.mul_(2))


class Transposed(checks.Scaled):
    """A layer that keeps its input and that transposed."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.T


def test_what_cannot_leave_is_refused(tmp_path: Path) -> None:
    whole = decoder(kept="all")
    ringray.offload(whole)
    with pytest.raises(ValueError, match=r"a Layer keeps other tensors .* checkpointed"):
        loss(whole)
    changing = checks.Stream(2)
    changing.layers = torch.nn.ModuleList(Changing() for _ in range(2))
    ringray.offload(changing)
    with pytest.raises(ValueError, match="changes its input in place"):
        changing(torch.ones(2, 3))
    squared = checks.Stream(2)
    squared.layers = torch.nn.ModuleList(Transposed() for _ in range(2))
    ringray.offload(squared)
    with pytest.raises(ValueError, match="a Transposed keeps other tensors"):
        squared(torch.ones(3, 3, requires_grad=True))
    with pytest.raises(ValueError, match="inputs of its 2 layers leave the device already"):
        ringray.offload(squared)
    with pytest.raises(ValueError, match="Linear has no list of layers"):
        ringray.offload(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"folder: got .*none, expected one that exists"):
        ringray.offload(decoder(), folder=tmp_path / "none")
    with pytest.raises(ValueError, match="offload: got true with kept: all, expected kept: input"):
        check(TINY, Degrees(), Recipe(SEQ_LEN, kept="all", offload=True))
    check(TINY, Degrees(), RECIPE)
