"""``offload``: inputs of checkpointed layers leave their device until the backward pass.

They go to pinned host memory, on a CPU rank to files, while their layer computes, and come back
while the layer behind it does so backward. So a device holds those of two layers.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._pytree import tree_leaves

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.comm.ring import RingGroup, connect
from ringray.models.decoder import Layer

Wait = Callable[[], object]  # returns when a copy is done, or raises OSError
Read = Callable[[], tuple[Tensor, Wait]]  # begins to copy a tensor back to its device

# Inputs in one file: few give their room back soon, many need few descriptors.
_INPUTS = 64


class OffloadError(ValueError):
    """A layer's input could not leave. It stayed on its device, so that no step is lost."""


class PinnedMemory:
    """Host memory, copied on a stream of its own. PyTorch keeps it from step to step, in blocks
    whose bytes are a power of two."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def write(self, x: Tensor) -> tuple[Read, Wait]:
        """Copies ``x`` to a new place; raises OSError where there is no room."""
        try:
            place = torch.empty_like(x, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise OSError(f"{x.nbytes:,} bytes of pinned memory: {error}") from None
        return partial(self.read, place), self._copy(x, place)

    def read(self, place: Tensor) -> tuple[Tensor, Wait]:
        """Copies from a place."""
        x = torch.empty_like(place, device=self._device)
        return x, self._copy(place, x)

    def _copy(self, source: Tensor, into: Tensor) -> Wait:
        """Copies behind the work that is queued now."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            copied = self._stream.record_event()
        return lambda: here.wait_event(copied)


class _File(io.FileIO):
    """A file without a name, which closes when the inputs in it are gone."""

    def __init__(self, folder: Path | None) -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            super().__init__(os.dup(file.fileno()), "r+")
        self.pid, self.inputs, self.end = os.getpid(), 0, 0

    def __del__(self) -> None:
        self.close()

    def move(self, call: Callable[..., int], start: int, x: Tensor) -> None:
        """Writes a tensor at ``start``, or reads it, its bytes in the order of memory: so those of
        one that is read are a view."""
        # `empty_like` closes gaps of the strides, as the tensor that is read has none.
        strides = torch.empty_like(x, device="meta").stride()
        x = x.permute(sorted(range(x.dim()), key=strides.__getitem__, reverse=True))
        view, done = memoryview(x.flatten().view(torch.uint8).numpy().data), 0
        while done < len(view):  # the kernel moves some bytes at a time
            moved = call(self.fileno(), [view[done:]], start + done)
            if not moved:
                raise OSError(f"a file ended after {done:,} of {len(view):,} bytes")
            done += moved


class Files(threading.local):
    """Files without names, each for some inputs of a thread. Their pages are the kernel's, which
    needs no memory for them once they are on the disk."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._latest: Callable[[], _File | None] = _nothing

    def write(self, x: Tensor) -> tuple[Read, Wait]:
        """Copies ``x`` behind the input before; raises OSError where there is no room."""
        file = self._latest()
        # A fork has the same files, in which it would write where its parent does.
        if file is None or file.inputs == _INPUTS or file.pid != os.getpid():
            file = _File(self._folder)
            # Only inputs hold the file: the last one that goes closes it, and frees its room.
            self._latest = weakref.ref(file)
        start = file.end
        file.move(os.pwritev, start, x)
        file.inputs, file.end = file.inputs + 1, start + x.nbytes
        return partial(self.read, file, start, torch.empty_like(x, device="meta")), _nothing

    def read(self, file: _File, start: int, like: Tensor) -> tuple[Tensor, Wait]:
        """Lets the kernel read from a file, which is copied when it is waited for."""
        x = torch.empty_like(like, device="cpu")
        os.posix_fadvise(file.fileno(), start, x.nbytes, os.POSIX_FADV_WILLNEED)
        return x, lambda: file.move(os.preadv, start, x)


def _nothing() -> None: ...


@dataclass(eq=False)
class Away:
    """A layer's input. ``x``: the tensor on its device, None when it is away; ``before``: the input
    that comes back next."""

    x: Tensor | None
    bytes: int
    read: Read
    copied: Wait
    before: Callable[[], Away | None]

    def release(self) -> None:
        """Waits until the tensor is copied; from now on it is the caller's."""
        copied, self.copied, self.x = self.copied, _nothing, None
        copied()

    def ahead(self) -> Tensor:
        """Begins to bring it back."""
        if self.x is None:
            self.x, self.copied = self.read()
        return self.x

    def back(self) -> Tensor:
        """Returns it, and begins to bring back the one before."""
        x = self.ahead()
        if (before := self.before()) is not None:
            before.ahead()
        self.release()
        return x

    def __del__(self) -> None:
        if self.x is not None and self.x.is_cuda:  # its memory is nobody else's before
            self.copied()


class _OffloadThread(threading.local):
    """State of this thread. ``latest``: the input that left last in a forward pass."""

    def __init__(self) -> None:
        self.latest: Callable[[], Away | None] = _nothing


class Offload:
    """The inputs of a model's layers that are away. A copy of the model shares them; one that was
    saved and loaded has its own."""

    def __init__(self, group: RingGroup, folder: Path | None) -> None:
        self.stores: dict[torch.device, PinnedMemory | Files] = {}
        self._group, self._folder, self._comm = group, folder, connect(group)
        self._thread = _OffloadThread()
        self._error: OSError | None = None
        self._away: weakref.WeakSet[Away] = weakref.WeakSet()

    def __deepcopy__(self, _: Any) -> Offload:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Offload, (self._group, self._folder)

    @property
    def bytes(self) -> int:
        """Returns the bytes of all inputs that wait elsewhere for their backward pass."""
        return sum(away.bytes for away in self._away if away.x is None)

    def leave(self, x: Tensor) -> Away | Tensor:
        """Sends a layer's input away, or returns it where that fails."""
        x = x.detach()
        if isinstance(x, AsyncCollectiveTensor):  # a message of TP may be under way
            x = x.trigger_wait()
        if x.device not in self.stores:
            cuda = x.device.type == "cuda"
            self.stores[x.device] = PinnedMemory(x.device) if cuda else Files(self._folder)
        try:
            away = Away(x, x.nbytes, *self.stores[x.device].write(x), self._thread.latest)
        except OSError as error:
            self._error = error
            return x
        self._thread.latest = weakref.ref(away)
        self._away.add(away)
        return away

    @torch.compiler.disable
    def begin(self, *_: Any) -> None:
        """Begins a forward pass; raises an error on every rank if an input stayed before."""
        self._thread.latest = _nothing
        if not torch.is_grad_enabled():
            return
        with refusing(self._comm):
            error, self._error = self._error, None
            if error is not None:
                raise OffloadError(
                    "offload: a layer's input could not leave, on CPUs to "
                    f"{self._folder or tempfile.tempdir or '$TMPDIR'}: {error}. It stayed where it "
                    "was, so the step before is as any other"
                )
            agree(self._comm, AgreedCall("offload"))


class _Forward:
    """The forward of a layer that sends its input away. Set on the layer, in place of that of its
    class or of ``own``, it ends with every exception, as hooks of a module do not. Copies of the
    layer have their own."""

    def __init__(self, offload: Offload, name: str, layer: nn.Module, own: Any) -> None:
        self._offload, self._name, self._own = offload, name, own
        self._layer = weakref.ref(layer)  # which has this: its memory is free when it is dropped

    def __reduce__(self) -> tuple[Any, ...]:
        return _Forward, (self._offload, self._name, self._layer(), self._own)

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **options: Any) -> Any:
        layer: Any = self._layer()
        # Looked up in each call: FSDP gives a layer another class after this was set.
        forward = self._own or partial(type(layer).forward, layer)
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **options)
        saved = _Saved(self._offload, args, options)
        try:
            with saved_tensors_hooks(saved.pack, lambda x: x.back() if isinstance(x, Away) else x):
                out = forward(*args, **options)
            saved.check(out, f"offload: {self._name}: a {type(layer).__name__}")
        finally:
            vars(saved).clear()  # the graph keeps the hooks
        return out


class _Saved:
    """What the forward pass of a layer saves."""

    def __init__(self, offload: Offload, args: Any, options: Any) -> None:
        self._offload = offload
        self._inputs = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        # The stream between layers comes first; of DTensors it is not known how they leave.
        plain = (x for x in self._inputs if type(x) in (Tensor, AsyncCollectiveTensor))
        self._stream = [x for x in plain if x.is_floating_point()][:1]
        self._kept: Away | Tensor | None = None  # in place of the stream
        self._version, self._keeps_others = 0, False

    def check(self, out: Any, layer: str) -> None:
        """Lets the stream go; raises ValueError for a layer that needs more than it keeps."""
        stream = self._kept
        if isinstance(stream, Away):
            # Its copy is done before the layer's caller may free or change the tensor.
            stream.release()
        if stream is not None and self._stream[0]._version != self._version:
            raise ValueError(f"{layer} changes its input in place")
        # A layer that returns its input, or needs no gradient, keeps nothing.
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        made = [x for x in outputs if not _among(self._inputs, x)]
        if self._keeps_others or (stream is None and any(x.requires_grad for x in made)):
            raise ValueError(
                f"{layer} keeps other tensors than the first that it is called with, expected a "
                "layer whose forward is checkpointed: kept='input' of a Decoder, "
                "gradient_checkpointing_enable() without its own offload, or "
                "checkpoint_wrapper(layer); layers= leaves others out"
            )

    def pack(self, x: Tensor) -> Away | Tensor:
        """Sends the stream away, and looks whether another tensor is saved."""
        if _among(self._stream, x):
            if self._kept is None:
                self._kept, self._version = self._offload.leave(x), self._stream[0]._version
            return self._kept
        self._keeps_others |= x.grad_fn is not None and not _among(self._inputs, x)
        return x


def _among(tensors: list[Tensor], x: Tensor) -> bool:
    """Returns whether ``x`` is one of some tensors, perhaps without its history."""

    def place(y: Tensor) -> tuple[Any, ...]:
        return y.data_ptr(), y.shape, y.stride()

    return any(y is x or (type(y) is type(x) and place(y) == place(x)) for y in tensors)


def offload(
    model: nn.Module,
    *,
    layers: Iterable[nn.Module] | None = None,
    group: RingGroup = None,
    folder: str | Path | None = None,
) -> Offload:
    """Makes inputs of a model's layers leave their device between forward and backward.

    Args:
        model: its layers are checkpointed in their forward, whose first tensor is the stream
            between layers, (B, S, H).
        layers: of the model; None: those whose class says that they are checkpointed (Hugging
            Face's, a ``Decoder``'s and ``checkpoint_wrapper``), or else those of its only list.
        group: the ranks that run forwards of this model at the same time; None: all.
        folder: of the files of CPU ranks, on a disk; None: that of temporary files ($TMPDIR).

    Returns:
        An object whose ``bytes`` are away.

    Raises:
        ValueError: on every rank, a model of which it is not clear what its layers are, or whose
            layers were here before, a folder that is not there. A forward raises it for a layer
            that is not checkpointed, and OffloadError, on every rank of ``group``, if an input
            could not leave in the one before.
    """
    comm = connect(group)
    with refusing(comm):
        chosen = _chosen(model, layers)
        lists = ", ".join(dict.fromkeys(name.rpartition(".")[0] or name for name in chosen))
        if any(isinstance(vars(layer).get("forward"), _Forward) for layer in chosen.values()):
            raise ValueError(
                f"model: inputs of its {len(chosen)} layers leave the device already ({lists})"
            )
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"folder: got {folder}, expected one that exists")
        agree(comm, AgreedCall("offload", model=type(model).__name__, layers=len(chosen)))
    made = Offload(group, None if folder is None else Path(folder).absolute())
    for name, layer in chosen.items():
        layer.forward = _Forward(made, name, layer, vars(layer).get("forward"))
    model.register_forward_pre_hook(made.begin)
    return made


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the layers of a model: of its longest list."""
    lists = [list(some.children()) for some in _outermost(model, _is_list)]
    return max(lists, key=len, default=[])


def _chosen(model: nn.Module, layers: Iterable[nn.Module] | None) -> dict[str, nn.Module]:
    """Returns the layers that send their inputs, by name."""
    names, kind = {part: name for name, part in model.named_modules()}, type(model).__name__
    lists = _outermost(model, _is_list)
    chosen = _outermost(model, _is_checkpointed) if layers is None else list(layers)
    if layers is not None and not (chosen and names.keys() >= set(chosen)):
        raise ValueError(f"layers: expected modules of the {kind}, one or more")
    if not chosen and len(lists) != 1:
        several = "several lists of layers: " + ", ".join(map(names.__getitem__, lists))
        raise ValueError(
            f"model: {kind} has {several if lists else 'no list of layers'}; expected one, "
            "layers=, or layers whose checkpointing is on"
        )
    return {names[layer]: layer for layer in chosen or lists[0].children()}


def _outermost(part: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Returns modules that are wanted, but not those inside of them."""
    if wanted(part):
        return [part]
    return [*dict.fromkeys(x for child in part.children() for x in _outermost(child, wanted))]


def _is_checkpointed(part: nn.Module) -> bool:
    """Returns whether the class of a module says that it is a checkpointed layer."""
    hf = sys.modules.get("transformers.modeling_layers")  # imported where there is such a layer
    if hf is not None and isinstance(part, hf.GradientCheckpointingLayer):
        return bool(part.gradient_checkpointing)
    return isinstance(part, CheckpointWrapper | Layer)


def _is_list(part: nn.Module) -> bool:
    """Returns whether a module is a list of modules that are called, which containers are not. A
    dictionary of several classes has the parts of a model."""
    kinds = {type(child) for child in part.children()}
    alike = isinstance(part, nn.ModuleDict) and len(kinds) == 1
    listed = bool(kinds) and (alike or isinstance(part, nn.ModuleList))
    return listed and all(kind.forward is not nn.Module.forward for kind in kinds)
