"""Backends of vendors' kernels: what reaches the kernels, and what comes back, without a GPU.

In place of the kernels stand plain functions with their signatures, shapes and demands on memory.
On a GPU ``test_gpu.py`` runs the kernels themselves.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringray.lab.plan.pruning import unfit
from ringray_kernels import State, forward, testing
from ringray_kernels.api import (
    BackwardOperands,
    Features,
    Operands,
    load_backend,
    resolve_backend,
)
from ringray_kernels.backends import DOWNLOADED, GPU_ONLY, PREFERRED, aten, cudnn, flash, fused
from ringray_kernels.intervals import intervals, visible_range
from tests.support.backend_problems import truth
from tests.support.point import point

ROWS, HEADS, KV_HEADS, DIM = 150, 4, 2, 16
SCALE = DIM**-0.5
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window": 90},
    "documents": {"causal": True, "cu_seqlens": torch.tensor([0, 70, 70, 150])},
    # Of the second hop's keys one row sees one.
    "a lone token": {"causal": True, "cu_seqlens": torch.tensor([0, 64, 65, 150])},
}


def readable(*tensors: Tensor) -> None:
    """Refuses what kernels misread, or fault on: rows that are not 16-byte aligned."""
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert not any(stride * x.itemsize % 16 for stride in x.stride()[:-1])
        assert x.data_ptr() % 16 == 0


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, lse and scores of (B, H, S, D) with shared heads."""
    readable(q, k, v)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    scores = q.double() @ k.mT * scale
    if causal:
        assert q.shape[2] == k.shape[2], "every vendor means the same mask only by a square"
        scores.masked_fill_(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    if bias is not None:
        scores += bias
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ v).to(q.dtype), lse.float(), scores


def differentiate(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float, bias: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Returns dq, dk, dv, shaped as given, from the global lse and output."""
    readable(dout)
    _, _, scores = attend(q, k, v, causal, scale, bias)
    weights = (scores - lse.double()[..., None]).exp()
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    delta = (dout.double() * out.double()).sum(-1, keepdim=True)
    ds = weights * (dout.double() @ wide_v.mT - delta) * scale
    shared = [ds.mT @ q.double(), weights.mT @ dout.double()]
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in shared)
    return [x.to(q.dtype) for x in (ds @ wide_k, dk, dv)]


class Operators:
    """PyTorch's operators of kernels on a GPU, its own and cuDNN's, with the arguments of their
    schemas."""

    calls = 0

    def __getattr__(self, name: str) -> Any:
        kind, backward = name.split("_")[4], name.endswith("backward")
        arguments = getattr(torch.ops.aten, name).default._schema.arguments

        def call(*values: Any, **named: Any) -> tuple[Any, ...]:
            self.calls += 1
            names = (argument.name.removesuffix("_") for argument in arguments)
            inputs = SimpleNamespace(**dict(zip(names, values, strict=False)), **named)
            assert inputs.dropout_p == 0.0
            assert not getattr(inputs, "return_debug_mask", False)
            assert kind != "flash" or inputs.query.dtype != torch.float32
            bias = getattr(inputs, "attn_bias", None)
            if bias is not None:
                assert kind == "efficient"
                self.check_bias(bias, inputs.query, inputs.key)
            asked = (inputs.is_causal, inputs.scale, bias)
            return (self.gradients if backward else self.attention)(kind, inputs, *asked)

        return call

    def attention(self, kind: str, given: Any, *asked: Any) -> tuple[Any, ...]:
        assert getattr(given, "compute_log_sumexp", True)
        out, lse, _ = attend(given.query, given.key, given.value, *asked)
        if kind == "cudnn":
            assert 0 not in given.key.stride()[:2]
            return out, lse[..., None], *[None] * 7
        if kind == "efficient":
            lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse, None, None

    def gradients(self, kind: str, given: Any, *asked: Any) -> tuple[Any, ...]:
        q, k, out, lse = given.query, given.key, given.out, given.logsumexp
        if kind == "efficient":
            assert given.grad_input_mask == [True, True, True, False]
            assert lse.shape[-1] % 32 == 0
            assert not any(stride % 8 for stride in lse.stride()[:2])
            lse = lse[:, :, : q.shape[2]]
            if out.dtype != torch.float32:
                out = self.misread(out)
        else:
            assert given.cum_seq_q is given.cum_seq_k is None, "packed sequences, of 3 dimensions"
            assert (given.max_q, given.max_k) == (q.shape[2], k.shape[2])
            assert kind == "cudnn" or lse.is_contiguous()
        if kind == "cudnn":
            assert max(q.shape[2], k.shape[2]) > 1, "cuDNN's backward refuses one row with one key"
            lse = lse[..., 0]
        grads = differentiate(given.grad_out, q, k, given.value, out, lse, *asked)
        return (*grads, None) if kind == "efficient" else tuple(grads)

    def check_bias(self, bias: Tensor, q: Tensor, k: Tensor) -> None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.dtype == q.dtype
        assert bias.stride(3) == 1
        assert bias.stride(2) % 8 == bias.data_ptr() % 16 == 0

    def misread(self, out: Tensor) -> Tensor:
        """The kernel takes rows of 16 bits for H * D elements apart."""
        _, heads, rows, dim = out.shape
        assert out.data_ptr() % 16 == 0
        reach = out.stride(0) * (len(out) - 1) + out.stride(1) * (heads - 1)
        reach += heads * dim * (rows - 1) + dim + out.storage_offset()
        memory = out.new_empty(0).set_(out.untyped_storage())
        memory = torch.nn.functional.pad(memory, (0, max(0, reach - len(memory))))
        strides = (out.stride(0), out.stride(1), heads * dim, 1)
        return memory.as_strided(out.shape, strides, out.storage_offset())


class Flash:
    """A module of FlashAttention ``version``: ``flash_attn.flash_attn_interface`` of 2,
    ``flash_attn_interface`` of 3, ``flash_attn.cute.interface`` of 4."""

    #: Arguments that version 2 has no defaults for, and others are not given.
    UNUSED = {  # noqa: RUF012
        "dropout_p": 0.0, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
        "alibi_slopes": None,
    }  # fmt: skip

    def __init__(self, version: int) -> None:
        self.version, self.calls = version, 0

    def attended(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        self.calls += 1
        out, lse, _ = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
        return out.transpose(1, 2), lse, None, None

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, scale: float,
    ) -> list[Tensor]:  # fmt: skip
        self.calls += 1
        assert lse.is_contiguous()
        tensors = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        return [x.transpose(1, 2) for x in differentiate(*tensors, lse, causal, scale)]

    def _flash_attn_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, **rest: Any
    ) -> Any:
        assert self.version in (2, 3)
        assert rest == ({} if self.version == 3 else self.UNUSED | {"return_softmax": False})
        return self.attended(q, k, v, causal, softmax_scale)

    def _flash_attn_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *,
        dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float, deterministic: bool, **rest: Any,
    ) -> Tensor:  # fmt: skip
        causal = rest.pop("is_causal" if self.version == 3 else "causal")
        assert deterministic
        assert rest == ({} if self.version == 3 else self.UNUSED)
        gradients = self.gradients(dout, q, k, v, out, softmax_lse, causal, softmax_scale)
        for into, x in zip((dq, dk, dv), gradients, strict=True):
            into.copy_(x)
        return softmax_lse

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None,
        causal: bool = False, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        assert self.version == 4
        assert return_lse
        assert softmax_scale is not None
        # Two results until beta 15, four from 27 on.
        return self.attended(q, k, v, causal, softmax_scale)[: 4 if self.calls % 2 else 2]

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *,
        softmax_scale: float | None = None, causal: bool = False, deterministic: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert deterministic
        assert softmax_scale is not None
        return tuple(self.gradients(dout, q, k, v, out, lse, causal, softmax_scale))


@pytest.fixture(params=["aten", "cudnn", "flash 2", "flash 3", "flash 4"])
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The backend, and what stands in place of its kernels, as if all tensors were on a GPU."""
    kernels: Any = Operators()
    monkeypatch.setattr(fused, "_ops", kernels)
    monkeypatch.setattr(fused, "on_cpu", lambda x: False)
    if request.param == "aten":
        return aten, kernels
    if request.param == "cudnn":
        kernels = Operators()
        monkeypatch.setattr(cudnn, "_ops", kernels)
        return cudnn, kernels
    kernels = Flash(int(request.param[-1]))
    calls = flash.Kernels(kernels, kernels.version)
    backend = flash.version_4 if kernels.version == 4 else flash.installed
    monkeypatch.setattr(backend, "_kernels", lambda q: calls)
    return backend, kernels


def placed(x: Tensor, layout: str) -> Tensor:
    """The same values in memory that kernels may not read as it is."""
    if layout == "odd rows":
        return torch.nn.functional.pad(x, (1, 0))[..., 1:]
    if layout == "odd address":
        return torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape)
    return x


@pytest.mark.parametrize(
    ("mask", "value_dim", "layout", "owner"),
    [
        *((mask, DIM, "", True) for mask in MASKS), ("causal", 8, "", True),
        ("window", DIM, "odd rows", True), ("documents", DIM, "odd address", True),
        ("full", DIM, "", False),
    ],
)  # fmt: skip
def test_two_hops_are_within_the_budget(
    vendor: Any, mask: str, value_dim: int, layout: str, owner: bool
) -> None:
    """``owner``: of the rows, which has their output."""
    backend, kernels = vendor
    q, k, v, dout = testing.make_inputs(
        2, HEADS, KV_HEADS, ROWS, DIM, torch.bfloat16, value_dim=value_dim, seed=0
    )
    q, k, v, dout = (placed(x, layout) for x in (q, k, v, dout))
    low, high = visible_range(torch.arange(ROWS), ROWS, **MASKS[mask])
    state: State | None = None
    hops = []
    for keys in (torch.arange(0, 64), torch.arange(64, ROWS)):
        start, end = (x[None] for x in intervals(low, high, keys))
        part = (placed(x[:, :, keys], layout) for x in (k, v))
        hops.append((keys, Operands(q, *part, start, end, SCALE, None)))
        dtype = q.dtype if len(hops) == 2 else torch.float32
        state = backend.forward(hops[-1][1], state, dtype)
    assert kernels.calls > 0
    delta = backend.delta(dout, state.out, state.lse)
    dq = torch.zeros(q.shape)
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    kernels.calls = 0
    for keys, operands in hops:
        part_k, part_v = torch.zeros(operands.k.shape), torch.zeros(operands.v.shape)
        out = placed(state.out, layout) if owner else None
        given = BackwardOperands(dout, out, state.lse, delta, dq, part_k, part_v)
        backend.backward(operands, given)
        dk[:, :, keys] += part_k
        dv[:, :, keys] += part_v
    assert kernels.calls > 0 or not owner  # these are in fp32
    seen = testing.visible(ROWS, **MASKS[mask])
    want, yard = truth((q, k, v, dout), seen, SCALE, causal=MASKS[mask]["causal"])
    found = {"out": state.out, "dq": dq, "dk": dk, "dv": dv}
    for name, got in found.items():
        share = testing.budget_share(
            got.to(q.dtype), getattr(want, name), getattr(yard, name), dout
        )
        assert share <= 1, (name, share)


HUB = """
from types import SimpleNamespace

def get_kernel(repo_id, *, revision=None, version=None, backend=None, user_agent=None,
               trust_remote_code=False, check_arch=True):
    if (revision is None) == (version is None):
        raise ValueError("A kernel version or revision must be specified.")
    if repo_id.endswith("4"):
        raise FileNotFoundError(f"no build of {repo_id} for this PyTorch")
    module = SimpleNamespace(origin=f"{repo_id} v{version}")
    return SimpleNamespace(flash_attn_interface=module)
"""
FILES = {
    "2": ("flash_attn/__init__.py", "flash_attn/flash_attn_interface.py"),
    "3": ("flash_attn_interface.py",),
    "4": ("flash_attn/cute/__init__.py", "flash_attn/cute/interface.py"),
    "kernels": ("kernels.py",),
}


def tensor_on_gpu() -> Any:
    """What backends look at of a tensor on a GPU."""
    device = torch.device("cuda")
    return SimpleNamespace(device=device, dtype=torch.bfloat16, shape=(1, 8, 64, 128))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Installs stand-ins, and asks a backend on a GPU: its module, or the reason why not."""

    def forget() -> None:
        flash._is_there.cache_clear()
        flash._loaded.cache_clear()
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("flash_attn", "flash_attn_interface", "kernels"):
                del sys.modules[name]
        importlib.invalidate_caches()

    def ask(name: str, major: int, *installed: str, **other: Any) -> Any:
        forget()
        folder = tmp_path / "-".join((*installed, "here"))
        for file in (file for package in installed for file in FILES[package]):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(HUB if file == "kernels.py" else "")
        monkeypatch.setattr(sys, "path", [str(folder)])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        backend: Any = load_backend(name)
        q = tensor_on_gpu()
        reason = backend.unsupported(q, Features(**other))
        return reason or flash._loaded(backend._package(q))

    yield ask
    forget()


@pytest.mark.parametrize(
    ("name", "major", "installed", "module"),
    [
        ("flash", 9, "2 3 4", "flash_attn_interface"),
        ("flash", 8, "2 3 4", "flash_attn.flash_attn_interface"),
        ("flash", 10, "2 4", "flash_attn.flash_attn_interface"),
        ("flash4", 9, "4", "flash_attn.cute.interface"),
        ("flash4", 10, "2 4", "flash_attn.cute.interface"),
        ("flash-hub", 9, "kernels 3", "kernels-community/flash-attn3 v1"),
        ("flash-hub", 8, "kernels", "kernels-community/flash-attn2 v4"),
        ("flash-hub", 12, "kernels", "kernels-community/flash-attn2 v4"),
    ],
)
def test_the_package_for_a_gpu(
    packages: Any, name: str, major: int, installed: str, module: str
) -> None:
    loaded = packages(name, major, *installed.split())
    assert getattr(loaded, "origin", None) or loaded.__name__ == module
    assert name != "flash-hub" or loaded.origin == module


@pytest.mark.parametrize(
    ("name", "major", "installed", "says"),
    [
        ("flash", 9, "", "flash-attn is not installed"),
        ("flash", 10, "3", "flash-attn is not installed"),  # of Hopper
        ("flash", 9, "4 kernels", "flash-attn is not installed"),  # though there is a flash_attn
        ("flash", 7, "2", "flash-attn is not installed"),
        ("flash4", 8, "4", "capability 9 to 11"),  # it has no backward pass there
        ("flash4", 12, "4", "capability 9 to 11"),  # nor is that repeatable
        ("flash4", 9, "2 3", "expected the package flash-attn-4"),
        ("flash-hub", 9, "2 3 4", "expected the package kernels"),
        ("flash-hub", 10, "kernels", "flash-attn4 cannot be loaded .FileNotFoundError: no build"),
    ],
)
def test_no_package_for_a_gpu(
    packages: Any, name: str, major: int, installed: str, says: str
) -> None:
    assert re.search(says, packages(name, major, *installed.split()))


def test_nothing_is_downloaded_for_an_error_message(packages: Any) -> None:
    assert "softcap" in packages("flash-hub", 9, "kernels", softcap=2.0)
    with pytest.raises(ValueError, match=r"flash-attn is not installed.*aten.* can") as error:
        resolve_backend("flash", tensor_on_gpu())
    assert not [name for name in DOWNLOADED if name in str(error.value)]
    assert "kernels" not in sys.modules


def test_no_vendor_is_preferred_unmeasured() -> None:
    """Which one is fastest differs: cuDNN's on Hopper only."""
    assert not {*GPU_ONLY} & {name for names in PREFERRED.values() for name in names}


class Calls(TorchDispatchMode):
    """PyTorch's fused operators that were called: names and shapes of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.shapes = list[str](), list[torch.Size]()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operator._schema.name.removeprefix("aten::_scaled_dot_product_")
        if name != operator._schema.name:
            self.names.append(name)
            self.shapes.append(args["backward" in name].shape)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "rows", "stepped", "kernel"),
    [
        (torch.bfloat16, 16384, False, "flash"),
        (torch.float32, 16384, False, "efficient"),
        (torch.bfloat16, 180, True, "efficient"),
    ],
)
def test_a_gpu_takes_all_heads_at_once_by_operators_of_this_pytorch(
    dtype: torch.dtype, rows: int, stepped: bool, kernel: str
) -> None:
    """By the operators' own checks of shapes, on tensors without memory."""
    start = torch.zeros(1, rows, dtype=torch.int32)
    end = torch.arange(rows, dtype=torch.int32)[None] // (1 + stepped) + 1
    q, k = (torch.empty(2, heads, rows, 128, dtype=dtype, device="meta") for heads in (32, 8))
    operands = Operands(q, k, k, start, end, SCALE, None)
    with Calls() as forwards:
        state = aten.forward(operands, None, dtype)
    grads = [torch.empty(x.shape, device="meta") for x in (q, k, k)]
    with Calls() as backwards:
        aten.backward(operands, BackwardOperands(q, state.out, state.lse, state.lse, *grads))
    assert forwards.names == [f"{kernel}_attention"]
    assert backwards.names == [f"{kernel}_attention_backward"]
    assert forwards.shapes == backwards.shapes == [(2 * 8, 4, rows, 128)]


@pytest.mark.parametrize("name", GPU_ONLY)
def test_refusals(name: str) -> None:
    q = torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)
    bounds = torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"backend '{name}': got tensors on cpu.*; .*aten.* can"):
        forward(q, q, q, bounds, bounds + 8, scale=1.0, backend=name)
    assert "on cpu" in (load_backend(name).unsupported(q) or "")
    config = point(backend=name, dtype="bfloat16")
    assert "runs on GPUs only" in str(unfit(config, "cpu"))
    assert unfit(config, "cuda") is None


@pytest.mark.parametrize(
    ("changed", "asked", "says"),
    [
        ({"dtype": torch.float32}, Features(), "got torch.float32, expected bfloat16 or float16"),
        ({}, Features(softcap=3.0), "got softcap 3.0"),
        ({"dim": 192}, Features(), "got head dim 192, expected a multiple of 8 up to 128"),
        ({"dim": 20}, Features(), "got head dim 20"),
        ({}, Features(value_dim=136), "got head dim 136"),
        ({"dim": 128}, Features(value_dim=64), None),
    ],
)
def test_limits(changed: dict[str, Any], asked: Features, says: str | None) -> None:
    q = torch.zeros(1, 1, 8, changed.get("dim", 16), dtype=changed.get("dtype", torch.float16))
    found = cudnn.limits(q, asked)
    assert found is None if says is None else says in (found or "")
