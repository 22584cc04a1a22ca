"""``offload``: inputs of checkpointed layers leave their device until the backward pass.

They go to pinned host memory, on a CPU rank to files, while their layer computes, and come back
while the layer behind it does so backward. So a device holds those of two layers.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.comm.ring import Comm, connect

Wait = Callable[[], object]  # returns when a copy is done, or raises OSError


class OffloadError(ValueError):
    """There was no room for a layer's input. It stayed on its device, so that no step is lost."""


class PinnedMemory:
    """Host memory, copied on a stream of its own. PyTorch keeps it from step to step, in blocks
    whose bytes are a power of two."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def write(self, x: Tensor) -> tuple[Tensor, Wait]:
        """Copies ``x`` to a new place, behind the work that is queued now."""
        try:
            place = torch.empty_like(x, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise OSError(f"{x.nbytes:,} bytes of pinned memory: {error}") from None
        return place, self.read(x, place)

    def read(self, place: Tensor, into: Tensor) -> Wait:
        """Copies from a place, likewise."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            into.copy_(place, non_blocking=True)
            copied = self._stream.record_event()
        return lambda: here.wait_event(copied)

    def free(self, place: Tensor) -> None:
        """Nothing: PyTorch does."""


class Files:
    """Files without names, which a thread writes and reads. Their pages are the kernel's, which
    needs no memory for them once they are on the disk."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._thread = folder, ThreadPoolExecutor(1, "offload")

    def write(self, x: Tensor) -> tuple[IO[bytes], Wait]:
        """Copies ``x`` to a new file."""
        file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 see ``free``
        return file, self._thread.submit(_move, os.pwritev, file, x).result

    def read(self, place: IO[bytes], into: Tensor) -> Wait:
        """Copies from a file."""
        return self._thread.submit(_move, os.preadv, place, into).result

    def free(self, place: IO[bytes]) -> None:
        """Removes a file."""
        place.close()


def _move(call: Callable[[int, list[memoryview], int], int], file: IO[bytes], x: Tensor) -> None:
    # Bytes are in the order of memory, so those of a tensor that is read are a view.
    strides = torch.empty_like(x, device="meta").stride()
    x = x.permute(sorted(range(x.dim()), key=strides.__getitem__, reverse=True))
    view, done = memoryview(x.flatten().view(torch.uint8).numpy().data), 0
    while done < len(view):  # the kernel moves some bytes at a time
        moved = call(file.fileno(), [view[done:]], done)
        if not moved:
            raise OSError(f"a file ended after {done:,} of {len(view):,} bytes")
        done += moved


def _nothing() -> None: ...


class _OffloadThread(threading.local):
    """State of this thread. ``latest``: the input that left last in a forward pass; ``passes``: of
    layers, those under way."""

    def __init__(self) -> None:
        self.latest: Callable[[], Away | None] = _nothing
        self.passes: list[_Pass] = []


class Offload:
    """The inputs of a model's layers that are away, and where they go."""

    def __init__(self, comm: Comm, folder: Path | None) -> None:
        self.stores: dict[torch.device, PinnedMemory | Files] = {}
        self.thread = _OffloadThread()
        self.error: OSError | None = None
        self._comm, self._folder = comm, folder
        self._away: weakref.WeakSet[Away] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Returns the bytes of all inputs that wait elsewhere for their backward pass."""
        return sum(away.bytes for away in self._away if away.x is None)

    def leave(self, x: Tensor) -> Away:
        """Sends a layer's input away."""
        x = x.detach()
        if isinstance(x, AsyncCollectiveTensor):  # a message of TP may be under way
            x = x.trigger_wait()
        if x.device not in self.stores:
            cuda = x.device.type == "cuda"
            self.stores[x.device] = PinnedMemory(x.device) if cuda else Files(self._folder)
        away = Away(x, self)
        self.thread.latest = weakref.ref(away)
        self._away.add(away)
        return away

    @torch.compiler.disable
    def begin(self) -> None:
        """Begins a forward pass; raises an error on every rank if one had no room before."""
        self.thread.latest = _nothing
        if not torch.is_grad_enabled():
            return
        with refusing(self._comm):
            error, self.error = self.error, None
            if error is not None:
                raise OffloadError(
                    "offload: no room for a layer's input, which on CPUs goes to "
                    f"{self._folder or tempfile.gettempdir()}: {error}. It stayed where it was, so "
                    "the step before is as any other"
                )
            agree(self._comm, AgreedCall("offload"))


class Away:
    """A layer's input. ``x``: the tensor while it is on its device, or a copy is under way."""

    def __init__(self, x: Tensor, made: Offload) -> None:
        self.bytes, self._version = x.nbytes, x._version
        self.x: Tensor | None = x
        self._like, self._device = torch.empty_like(x, device="meta"), x.device
        # The one that left before it is the next in a backward pass.
        self._made, self._store, self._before = made, made.stores[x.device], made.thread.latest
        self._place: Any = None
        self._copied: Wait | None = None
        try:
            self._place, self._copied = self._store.write(x)
        except OSError as error:
            made.error = error

    def left(self) -> None:
        """Waits until it is copied, and lets go of it if there was room."""
        if self.x is not None and self.x._version != self._version:
            raise ValueError("offload: a layer changes its input in place")
        try:
            self._wait()
        except OSError as error:
            self._made.error = error

    def ahead(self) -> None:
        """Begins to bring it back."""
        if self.x is None:
            self.x = torch.empty_like(self._like, device=self._device)
            self._copied = self._store.read(self._place, self.x)

    def back(self) -> Tensor:
        """Returns it, and begins to bring back the one before."""
        self.ahead()
        x = cast("Tensor", self.x)
        if (before := self._before()) is not None:
            before.ahead()
        if self._copied is not None:
            self.x = None  # it is the caller's, or if it cannot be read, nobody's
        self._wait()
        return x

    def _wait(self) -> None:
        copied, self._copied = self._copied, None
        if copied is not None:
            copied()
            self.x = None

    def __del__(self) -> None:
        with suppress(OSError):  # the tensor's memory is nobody else's before it is copied
            self._wait()
        if self._place is not None:
            self._store.free(self._place)


class _Pass(saved_tensors_hooks):
    """The forward pass of a layer, whose saved tensors are looked at."""

    def __init__(self, made: Offload, layer: nn.Module, args: Any, options: Any) -> None:
        super().__init__(self._pack, lambda x: x.back() if isinstance(x, Away) else x)
        self._made, self.of = made, layer
        self._inputs = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        # The stream between layers comes first; of DTensors it is not known how they leave.
        plain = (x for x in self._inputs if type(x) in (Tensor, AsyncCollectiveTensor))
        self._stream = next((x for x in plain if x.is_floating_point()), None)
        self._away: Away | None = None
        self.__enter__()

    def end(self, out: Any) -> None:
        """Ends it; ``out``: None behind an error."""
        self.__exit__()
        away, inputs = self._away, self._inputs
        self._away, self._inputs, self._stream = None, [], None
        if away is not None:
            away.left()
        elif any(
            # A layer that returns its input, or needs no gradient, keeps nothing.
            isinstance(x, Tensor) and x.requires_grad and not _among(inputs, x)
            for x in tree_leaves(out)
        ):
            raise self._refused()

    def _pack(self, x: Tensor) -> Away | Tensor:
        if self._stream is not None and _same(x, self._stream):
            self._away = self._away or self._made.leave(x)
            return self._away
        if x.grad_fn is not None and not _among(self._inputs, x):
            raise self._refused()
        return x

    def _refused(self) -> ValueError:
        name = type(self.of).__name__
        return ValueError(
            f"offload: a {name} keeps other tensors than the first that it is called with, "
            "expected a layer whose forward is checkpointed: kept='input' of a Decoder, "
            "gradient_checkpointing_enable() without its own offload, or checkpoint_wrapper(layer)"
        )


def _same(x: Tensor, y: Tensor) -> bool:
    """Returns whether two tensors are one, perhaps without its history."""
    if x is y or type(x) is not type(y) or x.data_ptr() != y.data_ptr():
        return x is y
    return x.shape == y.shape and x.stride() == y.stride()


def _among(inputs: list[Tensor], x: Tensor) -> bool:
    return any(_same(x, other) for other in inputs)


def offload(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    folder: str | Path | None = None,
) -> Offload:
    """Makes inputs of a model's layers leave their device between forward and backward.

    Args:
        model: its layers are checkpointed in their forward, whose first tensor is the stream
            between layers, (B, S, H).
        group: the ranks that run forwards of this model at the same time; None: all.
        folder: of the files of CPU ranks, on a disk; None: that of temporary files ($TMPDIR).

    Returns:
        An object whose ``bytes`` are away.

    Raises:
        ValueError: on every rank, a model without layers or whose layers were here before, a
            folder that is not there. A forward
            raises it for a layer that is not checkpointed, and OffloadError, on every rank of
            ``group``, if there was no room in the one before.
    """
    comm = connect(group)
    with refusing(comm):
        if not (layers := layers_of(model)):
            raise ValueError(f"model: {type(model).__name__} has no list of layers of one class")
        if any(getattr(x, "__module__", "") == __name__ for x in layers[0]._forward_hooks.values()):
            raise ValueError(f"model: inputs of its {len(layers)} layers leave the device already")
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"folder: got {folder}, expected one that exists")
        agree(comm, AgreedCall("offload", model=type(model).__name__, layers=len(layers)))
    made = Offload(comm, None if folder is None else Path(folder).absolute())
    for layer in layers:
        _watch(layer, made)
    # A copy of the model shares hooks that are functions.
    model.register_forward_pre_hook(lambda *_: made.begin())
    return made


def _watch(layer: nn.Module, made: Offload) -> None:
    @torch.compiler.disable
    def before(layer: nn.Module, args: Any, options: Any) -> None:
        if layer.training and torch.is_grad_enabled():
            made.thread.passes.append(_Pass(made, layer, args, options))

    @torch.compiler.disable
    def behind(layer: nn.Module, __: Any, out: Any) -> None:
        passes = made.thread.passes
        if passes and passes[-1].of is layer:
            passes.pop().end(out)

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(behind, always_call=True)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the layers of a model: of its longest list of modules of one class."""
    containers = (x for x in model.modules() if isinstance(x, nn.ModuleList | nn.ModuleDict))
    lists = [list(container.children()) for container in containers]
    alike = [some for some in lists if len({*map(type, some)}) == 1]
    # Containers have no forward.
    called = [some for some in alike if type(some[0]).forward is not nn.Module.forward]
    return max(called, key=len, default=[])
