"""Backends of vendors' kernels: what reaches the kernels, and what comes back, without a GPU.

In place of the kernels stand plain functions with their signatures, shapes and demands on memory.
On a GPU ``test_gpu.py`` runs the kernels themselves.
"""

from __future__ import annotations

import importlib
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
from tests.support.vendor_kernels import Flash, Operators

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
        *((mask, DIM, "", True) for mask in MASKS),
        ("causal", 8, "", True),
        ("window", DIM, "odd rows", True),
        ("documents", DIM, "odd address", True),
        ("full", DIM, "", False),
    ],
)
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
    "torn": ("flash_attn_interface.py",),
}
CONTENTS = {"kernels": HUB, "torn": "import flash_attn_3_cuda"}


def tensor_on_gpu() -> Any:
    """Returns what backends look at of a tensor on a GPU."""
    device = torch.device("cuda")
    return SimpleNamespace(device=device, dtype=torch.bfloat16, shape=(1, 8, 64, 128))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Installs stand-ins, and asks a backend on a GPU: its module, or the reason why not."""

    def forget() -> None:
        flash._loaded.cache_clear()
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("flash_attn", "flash_attn_interface", "kernels"):
                del sys.modules[name]
        importlib.invalidate_caches()

    def ask(name: str, major: int, *installed: str, **other: Any) -> Any:
        forget()
        folder = tmp_path / "-".join((*installed, "here"))
        for package, file in ((name, file) for name in installed for file in FILES[name]):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(CONTENTS.get(package, ""))
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
        ("flash", 9, "2 torn", "flash_attn_interface cannot be loaded .ModuleNotFoundError"),
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
    """Holds that cuDNN's kernel, the fastest on Hopper only, comes last."""
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
