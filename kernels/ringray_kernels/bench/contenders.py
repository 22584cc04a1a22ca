"""Contenders: the implementations of attention that are measured, ours and others.

To add one: write a class with ``unsupported`` and ``prepare`` as in ``Contender`` (most need only
an ``attend`` function given to ``Autograd``) and add it to ``CONTENDERS``. Use its best natural
call: its own layout, causal and window flags, packed lengths, no explicit mask.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringray_kernels
from ringray_kernels.api import Features, State, load_backend
from ringray_kernels.backends import BLOCKS, on_device
from ringray_kernels.bench.flex import flex
from ringray_kernels.bench.problems import Inputs, Point, is_headline
from ringray_kernels.config import Blocks
from ringray_kernels.defaults import CANDIDATES, PORTABLE
from ringray_kernels.intervals import intervals
from ringray_kernels.quantize import Scales, quantized

Results = dict[str, Tensor]
_UNSEEN = 64  # key rows of the hop in which nothing is visible


class Unsupported(Exception):
    """A contender turned out unable to compute a point."""


class Contender(Protocol):
    """An attention that can be measured. If it is ``deterministic``, results that change while it
    is timed are an error. ``quantized``: it computes in 8 bits, and is checked as such."""

    @property
    def deterministic(self) -> bool: ...

    @property
    def quantized(self) -> bool: ...

    def unsupported(self, point: Point, device: torch.device) -> str | None:
        """Returns why it cannot compute ``point`` on ``device``, or None if it may."""

    def prepare(self, point: Point, inputs: Inputs) -> Callable[[], Results]:
        """Returns the timed function: out, or dq, dk, dv by name, (1, heads, S, D) in q's dtype.

        Backward may run the forward pass here. Raises ``Unsupported`` if it turns out not to work.
        """


@dataclass(frozen=True)
class Ringray:
    """Our kernels with all costs of a ring of one: delta, zeroed fp32 gradients and their cast.
    ``blocks``: by head dim, of others the default; ``backend`` None is triton on a GPU, aten on a
    CPU. ``quantized``: q, k and v are given in 8 bits; a ring makes these once for all hops."""

    blocks: Mapping[int, Blocks] = field(default_factory=dict)
    backend: str | None = None
    deterministic: bool = True
    quantized: bool = False

    def backend_on(self, device: torch.device) -> str:
        return self.backend or on_device("auto", device.type)

    def unsupported(self, point: Point, device: torch.device) -> str | None:
        if not self.quantized:
            return None
        if point.direction == "backward" or not point.is_half:
            return "8 bits in place of 16, forward only"
        if device.type == "cpu":
            return None
        module = load_backend(self.backend_on(device))
        like = torch.empty(1, 1, 0, point.head_dim, dtype=point.torch_dtype, device=device)
        return module.unsupported(like, Features(point.head_dim, quantized=True))

    def prepare(self, point: Point, inputs: Inputs) -> Callable[[], Results]:
        device = inputs.q.device
        low, high = point.visible(device)
        positions = torch.arange(point.seq_len, device=device)
        blocks, backend = self.blocks.get(point.head_dim), self.backend_on(device)
        common: dict[str, Any] = {"scale": point.scale, "blocks": blocks, "backend": backend}
        q, k, v, dout = inputs
        hops = point.form == "hops"
        parts = (slice(0, None, 2), slice(1, None, 2)) if hops else (slice(None),)
        unseen = torch.full_like(k[:, :, :_UNSEEN], torch.nan)

        # As in a ring, intervals and what kernels derive from them are made once for all layers.
        calls: list[tuple[Any, ...]] = []  # keys, values, start, end, rows of the keys
        for x in parts:
            start, end = intervals(low, high, positions[x].contiguous())
            calls.append((k[:, :, x], v[:, :, x], start[None], end[None], x))
        if hops:
            nothing = torch.full_like(calls[0][2], 7)
            calls.insert(1, (unseen, unseen, nothing, nothing, slice(0, _UNSEEN)))

        scales: list[Scales | None] = [None] * len(calls)
        if self.quantized:
            q, of_q = quantized(q)
            for number, (keys, values, *rest) in enumerate(calls):
                (keys, of_k), (values, of_v) = quantized(keys), quantized(values)
                calls[number], scales[number] = (keys, values, *rest), (of_q, of_k, of_v)

        def attend() -> State:
            state = None
            for (keys, values, start, end, x), of_rows in zip(calls, scales, strict=True):
                dtype = point.torch_dtype if x is parts[-1] else None
                hop = {**common, "state": state, "out_dtype": dtype, "scales": of_rows}
                state = ringray_kernels.forward(q, keys, values, start, end, **hop)
            assert state is not None
            return state

        if point.direction == "forward":
            return lambda: {"out": attend().out}
        out, lse = attend()

        def backward() -> Results:
            delta = ringray_kernels.delta(dout, out, lse, backend=backend)
            dq, dk, dv = (
                torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (q, k, v)
            )
            for keys, values, start, end, x in calls:
                hop = {**common, "dq": dq, "dk": dk[:, :, x], "dv": dv[:, :, x], "out": out}
                ringray_kernels.backward(dout, q, keys, values, lse, delta, start, end, **hop)
            return {"dq": dq.to(q.dtype), "dk": dk.to(q.dtype), "dv": dv.to(q.dtype)}

        return backward


@dataclass(frozen=True)
class HopperBlocks(Ringray):
    """Our kernels on Hopper in blocks that are or may become a default."""

    def unsupported(self, point: Point, device: torch.device) -> str | None:
        nvidia = device.type == "cuda" and torch.version.hip is None
        hopper = nvidia and torch.cuda.get_device_capability(device) == (9, 0)
        interpreted = device.type == "cpu" and BLOCKS[self.backend_on(device)] == "tiles"
        if not (hopper or interpreted):
            return "for Hopper GPUs only"
        blocks = self.blocks.get(point.head_dim)
        if blocks is None or not point.is_half:
            return f"for 16 bits and head dims {', '.join(map(str, self.blocks))}"
        backward = replace(blocks, forward=None) != Blocks()
        differs = blocks.forward is not None if point.direction == "forward" else backward
        return None if differs else f"no other blocks {point.direction}"


@dataclass(frozen=True)
class Autograd:
    """An ``attend(point, q, k, v) -> out`` with gradients, all (1, heads, S, D).

    ``limits(point, device)`` returns why it cannot, or None.
    """

    attend: Callable[[Point, Tensor, Tensor, Tensor], Tensor]
    limits: Callable[[Point, torch.device], str | None]
    deterministic: bool = False
    quantized: bool = False

    def unsupported(self, point: Point, device: torch.device) -> str | None:
        return self.limits(point, device)

    def prepare(self, point: Point, inputs: Inputs) -> Callable[[], Results]:
        if point.direction == "forward":

            def forward() -> Results:
                with torch.no_grad():
                    return {"out": self.attend(point, *inputs[:3])}

            return forward
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        out = self.attend(point, *leaves)

        def backward() -> Results:
            grads = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
            return dict(zip(("dq", "dk", "dv"), grads, strict=True))

        return backward


def _sdpa(backend: SDPBackend) -> Autograd:
    """Returns SDPA with one backend and its own flags: full and causal."""

    def limits(point: Point, device: torch.device) -> str | None:
        if point.mask not in ("full", "causal"):
            return f"SDPA takes {point.mask} as a written-out mask only"
        return None

    def call(point: Point, q: Tensor, k: Tensor, v: Tensor, *, shares: bool) -> Tensor:
        if not shares:
            k, v = (x.repeat_interleave(point.heads // point.kv_heads, 1) for x in (k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, is_causal=point.causal, scale=point.scale, enable_gqa=shares
            )

    @lru_cache(maxsize=1)
    def shares_heads(point: Point, device: torch.device) -> bool:
        """Tries with a tiny problem whether the backend takes shared heads without a copy."""
        tiny = replace(point, seq_len=128)
        q, k = (
            torch.zeros(1, heads, 128, point.head_dim, dtype=point.torch_dtype, device=device)
            for heads in (point.heads, point.kv_heads)
        )
        needs_grad = point.direction == "backward"
        leaves = [x.clone().requires_grad_(needs_grad) for x in (q, k, k)]
        try:
            call(tiny, *leaves, shares=True)
        except RuntimeError:
            return False
        return True

    def attend(point: Point, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shares = point.heads == point.kv_heads or shares_heads(point, q.device)
        try:
            return call(point, q, k, v, shares=shares)
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                name = backend.name.lower().partition("_")[0]
                raise Unsupported(f"SDPA has no {name} kernel for this here") from error
            raise

    return Autograd(attend, limits)


def _packed(*tensors: Tensor) -> list[Tensor]:
    """Returns views of (1, H, S, D) as (S, H, D), the layout of packed calls."""
    return [x[0].transpose(0, 1) for x in tensors]


@lru_cache(maxsize=4)
def _boundaries(point: Point, device: torch.device) -> tuple[Tensor, int]:
    """Returns boundaries as int32 on the device, and the rows of the longest document."""
    bounds = point.boundaries or (0, point.seq_len)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    return torch.tensor(bounds, dtype=torch.int32, device=device), longest


def _window(point: Point) -> tuple[int, int]:
    """Returns the visible keys before and after the own one, -1 for all."""
    if point.window is not None:
        return point.window, 0
    return (-1, 0) if point.causal else (-1, -1)


def _half_on_gpu(point: Point, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    return None if point.is_half else "16-bit dtypes only"


def _varlen() -> Autograd:
    """Returns ``torch.nn.attention.varlen``: PyTorch's flash kernel on packed documents."""

    def limits(point: Point, device: torch.device) -> str | None:
        if point.mask not in ("documents", "window"):
            return "for packed and windowed problems; sdpa-flash is the same kernel"
        if point.kv_heads != point.heads:
            return "measured with as many key/value heads as query heads only"
        return _half_on_gpu(point, device)

    def attend(point: Point, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        varlen: Any = importlib.import_module("torch.nn.attention.varlen")
        cu, longest = _boundaries(point, q.device)
        packed = _packed(q, k, v)
        out = varlen.varlen_attn(*packed, cu, cu, longest, longest, window_size=_window(point))
        return out.transpose(0, 1)[None]

    return Autograd(attend, limits)


def _flash_attn(module: str) -> Autograd:
    """Returns the package flash-attn (``flash_attn``) or FlashAttention 3
    (``flash_attn_interface``)."""

    def limits(point: Point, device: torch.device) -> str | None:
        if importlib.util.find_spec(module) is None:
            return "not installed"
        return _half_on_gpu(point, device)

    def attend(point: Point, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        package = importlib.import_module(module)
        how: dict[str, Any] = {"causal": point.causal, "softmax_scale": point.scale}
        if point.window is not None:
            how["window_size"] = _window(point)
        if point.mask == "documents":
            cu, longest = _boundaries(point, q.device)
            out = package.flash_attn_varlen_func(*_packed(q, k, v), cu, cu, longest, longest, **how)
            out = out[0] if isinstance(out, tuple) else out  # some versions return lse as well
            return out.transpose(0, 1)[None]
        out = package.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **how)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Autograd(attend, limits)


def _gpu_only(point: Point, device: torch.device) -> str | None:
    return None if device.type == "cuda" else "compiled for GPUs only here"


def _headline_on_gpu(point: Point, device: torch.device) -> str | None:
    return _gpu_only(point, device) if is_headline(point) else "tuned at the headlines"


# Ours first: a run that is cut short has measured them.
CONTENDERS: dict[str, Contender] = {
    "ringray": Ringray(),
    "ringray-portable": HopperBlocks(PORTABLE),
    **{
        f"ringray-{blocks}".replace(",", "+"): HopperBlocks({head_dim: blocks})
        for head_dim, every in CANDIDATES.items()
        for blocks in every
    },
    "ringray-fp8": Ringray(quantized=True),
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa-efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "torch-varlen": _varlen(),
    "flash-attn": _flash_attn("flash_attn"),
    "flash-attn-3": _flash_attn("flash_attn_interface"),
    "flex": Autograd(flex, _gpu_only),
    "flex-tuned": Autograd(partial(flex, tuned=True), _headline_on_gpu),
}
# Those that take seconds of compilation per case: measured after all others, beside "ringray" once
# more.
LAST = ("flex", "flex-tuned")


def is_ours(contender: str) -> bool:
    return contender.partition("-")[0] == "ringray"
