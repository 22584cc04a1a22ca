"""Inputs of layers that leave the device: the same training, in exactly so much less memory."""

from __future__ import annotations

import copy
import errno
import gc
import multiprocessing
import os
import resource
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import ringray
from ringray.training import offload
from ringray.training.recipe import Degrees
from tests.support import offload_checks as checks
from tests.support.offload_checks import SEQ_LEN, TINY, decoder, equal, gradients, loss
from tests.support.ranks import on_ring

STREAM = SEQ_LEN * TINY.hidden * 4  # bytes


@pytest.mark.parametrize("kept", ["input", "attention"])
def test_steps_are_bitwise_the_same(kept: str) -> None:
    on_ring(1, [partial(checks.steps_are_bitwise_the_same, Degrees(), kept)])


@pytest.mark.parametrize("degrees", [Degrees(cp=2), Degrees(pp=2), Degrees(tp=2)], ids=str)
def test_steps_of_two_ranks_are_bitwise_the_same(degrees: Degrees) -> None:
    on_ring(2, [partial(checks.steps_are_bitwise_the_same, degrees, "input")])


def test_a_hugging_face_model_trains_the_same() -> None:
    on_ring(2, [checks.hugging_face_model_is_the_same])


def test_a_rank_without_room_stops_all_behind_its_step() -> None:
    on_ring(2, [checks.disk_without_room])


def test_a_context_fits_only_with_it(tmp_path: Path) -> None:
    on_ring(1, [partial(checks.fits_only_away, tmp_path)])
    assert not [*tmp_path.iterdir()]


def live(work: Any) -> int:
    """Bytes of tensors that a call leaves."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def test_exactly_the_inputs_of_layers_are_freed() -> None:
    models = {name: decoder() for name in ("here", "away")}
    away, losses = ringray.offload(models["away"]), {}
    for model in models.values():
        loss(model).backward()  # tables of positions stay
        model.zero_grad()
    bytes_of = {
        name: live(lambda model=model, name=name: losses.update({name: loss(model)}))
        for name, model in models.items()
    }
    assert bytes_of["here"] - bytes_of["away"] == away.bytes == TINY.layers * STREAM
    for value in losses.values():
        value.backward()
    assert away.bytes == 0
    assert equal(*map(gradients, models.values()))


def test_graphs_may_be_several_kept_or_dropped() -> None:
    models = [decoder(), decoder()]
    away = ringray.offload(models[1])
    for model in models:
        first, second = loss(model), loss(model, 3)
        first.backward(retain_graph=True)
        (first + second).backward()
    assert equal(*map(gradients, models))
    del first, second
    assert away.bytes == 0
    first, second = loss(models[1]), loss(models[1], 3)
    second.backward()
    assert away.bytes == TINY.layers * STREAM  # those of another graph do not come back ahead
    del first
    evaluated = loss(models[1].eval())  # of a model that is not in training nothing leaves
    assert away.bytes == 0
    evaluated.backward()
    with torch.no_grad():
        loss(models[1].train())
    assert away.bytes == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_nothing(error: type[BaseException]) -> None:
    def fails(*_: Any) -> None:
        raise error

    model, wanted = decoder(), decoder()
    away = ringray.offload(model)
    for part in (model.norm, model.layers["1"].mlp):  # behind the layers, and in the second one
        hook = part.register_forward_pre_hook(fails)
        with pytest.raises(error):
            loss(model)
        hook.remove()
        assert away.bytes == 0
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    other(torch.randn(2, 4)).sum().backward()
    assert away.bytes == 0
    loss(model).backward()
    loss(wanted).backward()
    assert equal(gradients(model), gradients(wanted))


def test_what_cannot_be_read_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wanted, x = checks.Stream(1), checks.Stream(1), torch.randn(2, 3)
    ringray.offload(model)
    value = model(x).sum()
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(OSError, match="a file ended after 0 of 24 bytes"):
            value.backward(retain_graph=True)
    value.backward()
    wanted(x).sum().backward()
    assert equal(gradients(model), gradients(wanted))


def test_a_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    model, x = checks.Stream(1), torch.ones(2, 3)
    away = ringray.offload(model, folder="files")
    monkeypatch.chdir("/")
    out = model(x)
    assert away.bytes == x.nbytes
    out.sum().backward()


def test_copies_and_threads_of_a_model_train_the_same() -> None:
    model, wanted = checks.Stream(3), checks.Stream(3)
    away = ringray.offload(model)
    x = torch.randn(2, 1000, 3)
    model(x).sum().backward()
    model.zero_grad()
    models = [model, model, copy.deepcopy(model)]

    def trains(one: torch.nn.Module) -> None:
        for _ in range(20):
            one(x).sum().backward()

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(trains, one) for one in models]:
            done.result()
    trains(wanted)
    for part, copied, want in zip(model.layers, models[2].layers, wanted.layers, strict=True):
        torch.testing.assert_close(part.scale.grad, 2 * want.scale.grad)  # sums in any order
        torch.testing.assert_close(copied.scale.grad, want.scale.grad)
    assert away.bytes == 0


def test_a_fork_trains_on_beside_its_parent() -> None:
    """Inputs of the parent are away meanwhile: neither waits, or writes where the other does."""
    model, wanted = checks.Stream(3), checks.Stream(3)
    ringray.offload(model)
    x = torch.randn(2, 10, 3)
    model(x).sum().backward()
    model.zero_grad()
    first = model.layers[0](x)  # the child goes on with this forward pass, too
    child = multiprocessing.get_context("fork").Process(
        target=lambda: [layer(first + 1) for layer in model.layers[1:]][-1].sum().backward()
    )
    child.start()
    child.join(60)
    hangs = child.is_alive()
    child.kill()
    child.join()
    assert not hangs
    assert child.exitcode == 0
    model.layers[2](model.layers[1](first)).sum().backward()
    wanted(x).sum().backward()
    assert equal(gradients(model), gradients(wanted))


def test_a_model_that_is_saved_and_loaded_sends_its_inputs_away(tmp_path: Path) -> None:
    model, wanted = decoder(), decoder()
    ringray.offload(model, folder=tmp_path)
    loss(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    (away,) = {hook.__self__ for hook in loaded._forward_pre_hooks.values()}
    value = loss(loaded)
    assert away.bytes == TINY.layers * STREAM
    value.backward()
    loss(wanted).backward()
    assert equal(gradients(loaded), gradients(wanted))
    with pytest.raises(ValueError, match="leave the device already"):
        ringray.offload(loaded)


def test_inputs_in_any_number_need_few_descriptors_and_give_their_room_back() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    layers, x, before = 2000, torch.randn(2, 3), descriptors()
    model, wanted = checks.Stream(layers), checks.Stream(layers)
    away = ringray.offload(model)
    out = model(x).sum()
    assert away.bytes == layers * x.nbytes
    assert descriptors() - before <= 50
    out.backward()
    wanted(x).sum().backward()
    assert equal(gradients(model), gradients(wanted))
    assert descriptors() <= before


def test_a_model_is_freed_when_it_is_dropped() -> None:
    model = checks.Stream(2)
    ringray.offload(model)
    model(torch.ones(2, 3)).sum().backward()
    layer = weakref.ref(model.layers[0])
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_an_input_that_cannot_leave_is_told_as_the_system_says_it(tmp_path: Path) -> None:
    def error(folder: Path, breaks: Callable[[], object]) -> str:
        model, x = checks.Stream(1), torch.ones(2, 3)
        ringray.offload(model, folder=folder)
        breaks()
        model(x).sum().backward()  # as any other step
        with pytest.raises(offload.OffloadError, match=f"could not leave, .*{folder}") as caught:
            model(x)
        return str(caught.value)

    gone = tmp_path / "gone"
    gone.mkdir()
    assert os.strerror(errno.ENOENT) in error(gone, gone.rmdir)
    assert os.strerror(errno.ENOENT) in error(Path("/proc"), lambda: None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert os.strerror(errno.EMFILE) in error(tmp_path, few)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Skipped(checks.Scaled):
    """A layer that returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Reentrant(checks.Scaled):
    """A layer that computes its forward without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self._scaled, x, use_reentrant=True)


@pytest.mark.parametrize(("layer", "needed"), [(Skipped, True), (Reentrant, False)])
def test_layers_that_keep_nothing_send_nothing(layer: type[checks.Scaled], needed: bool) -> None:
    model = checks.Stream(2)
    model.layers = torch.nn.ModuleList(layer() for _ in range(2))
    away = ringray.offload(model)
    assert model(torch.ones(2, 3, requires_grad=needed)).requires_grad is needed
    assert away.bytes == 0


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_layers_send_their_inputs_away(whole: bool) -> None:
    model, wanted = decoder(), decoder()
    away = ringray.offload(model)
    for part in [model] if whole else model.layers.values():
        part.compile(backend="aot_eager")
    out = loss(model)
    assert away.bytes == TINY.layers * STREAM
    out.backward()
    loss(wanted).backward()
    for x, y in zip(gradients(model), gradients(wanted), strict=True):
        torch.testing.assert_close(x, y)
    torch._dynamo.reset()


@pytest.mark.parametrize("sparse", [False, True])
def test_inputs_come_back_as_they_lay_in_memory(sparse: bool) -> None:
    """A stream (S, B, H) is often a view of (B, S, H): what is computed again sees its strides."""
    x = torch.randn(7, 5, 3).transpose(0, 1)
    x = x[:, ::2] if sparse else x
    models = [checks.Stream(3), checks.Stream(3)]
    strides: list[list[Any]] = [[], []]
    ringray.offload(models[1])
    for model, seen in zip(models, strides, strict=True):
        for layer in model.layers:
            scaled = layer._scaled

            def seeing(x: Tensor, scaled: Any = scaled, seen: list[Any] = seen) -> Tensor:
                seen.append(x.stride())
                return scaled(x)

            layer._scaled = seeing
        model(x).pow(2).sum().backward()
    assert equal(*map(gradients, models))
    if not sparse:  # a view with gaps comes back without them
        assert strides[0] == strides[1]


class FakeStream:
    """A stream of a device that is not there; its copies are done at once."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wait_stream(self, other: Any) -> None:
        self.calls.append("waits")

    def record_event(self) -> str:
        return "event"

    def wait_event(self, event: str) -> None:
        self.calls.append(event)

    def __enter__(self) -> None:
        self.calls.append("copies")

    def __exit__(self, *_: Any) -> None: ...


def test_pinned_memory_is_copied_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins: it has not run on a GPU."""
    here, side, empty = FakeStream(), FakeStream(), torch.empty_like
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    model, wanted = decoder(), decoder()
    away = ringray.offload(model)
    away.stores[torch.device("cpu")] = offload.PinnedMemory(torch.device("cpu"))
    monkeypatch.setattr(torch, "empty_like", lambda x, pin_memory=False, **o: empty(x, **o))
    out = loss(model)
    assert away.bytes == TINY.layers * STREAM
    assert side.calls == ["waits", "copies"] * TINY.layers
    assert here.calls == ["event"] * TINY.layers  # behind each layer
    out.backward()
    loss(wanted).backward()
    assert equal(gradients(model), gradients(wanted))
    assert side.calls == ["waits", "copies"] * 2 * TINY.layers
    assert here.calls == ["event"] * 2 * TINY.layers


def test_the_input_before_comes_back_ahead_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read when the layer behind it begins its backward pass, and no earlier."""
    reads: list[int] = []
    read = offload.Files.read

    def reading(self: Any, *place: Any) -> Any:
        reads.append(calls[0])
        return read(self, *place)

    model, calls = checks.Stream(4), [0]
    monkeypatch.setattr(offload.Files, "read", reading)
    ringray.offload(model)
    for layer in model.layers:
        scaled = layer._scaled

        def counting(x: Tensor, scaled: Any = scaled) -> Tensor:
            calls[0] += 1
            return scaled(x)

        layer._scaled = counting
    out = model(torch.ones(1, 2, 3)).sum()
    calls[0] = 0
    out.backward()
    assert reads == [0, 0, 1, 2]  # layers that have begun
