"""The public op on one device, by every backend: the same numbers, whatever changes its scores.

On a CPU the two backends that are fast there; on a GPU all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringray
from ringray_kernels import testing
from ringray_kernels.api import Features, load_backend
from ringray_kernels.backends import BACKENDS
from tests.support import pair_checks
from tests.support.backend_problems import DROPOUT_SEED, ON_GPU, Problem, Result, check

PLACES = [
    *(pytest.param("cpu", name) for name in ("aten", "reference")),
    *(pytest.param("cuda", name, marks=ON_GPU) for name in BACKENDS),
]
SHARED: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "rows": 150, "head_dim": 64}
PROBLEMS: dict[str, dict[str, Any]] = {
    "window": {"window": 40},
    "documents": {"cu": (0, 40, 40, 150)},
    "softcap": {"softcap": 2.0},
    "slopes": {"slopes": testing.make_slopes(4), "window": 90},
    "dropout": {"dropout_p": 0.3},
    "table": {"table": testing.make_table(4, 9, seed=1), "causal": False},
    "sinks and values": {"with_sinks": True, "value_dim": 32},
    "global tokens": {"window": 30, "global_tokens": 5},
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(("device", "backend"), PLACES)
def test_scores(device: str, backend: str, name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        problem = Problem(dtype=dtype, **SHARED, **PROBLEMS[name])
        q, k, v, dout = (x.to(device) for x in problem.inputs)
        asked = Features(
            v.shape[3], problem.softcap, dropout=problem.dropout_p > 0,
            biased=problem.slopes is not None or problem.table is not None,
        )  # fmt: skip
        if load_backend(backend).unsupported(q, asked) is not None:
            continue
        leaves = {"dq": q, "dk": k, "dv": v, "dsinks": problem.sinks, "dtable": problem.table}
        found = {
            at: x.detach().to(device).requires_grad_() for at, x in leaves.items() if x is not None
        }
        out, lse = ringray.ring_attention(
            found["dq"], found["dk"], found["dv"], causal=problem.causal, window=problem.window,
            cu_seqlens=problem.boundaries, global_tokens=problem.global_tokens,
            softcap=problem.softcap, sinks=found.get("dsinks"), alibi_slopes=problem.slopes,
            distance_bias=found.get("dtable"), dropout_p=problem.dropout_p,
            dropout_seed=DROPOUT_SEED if problem.dropout_p else None, backend=backend,
            return_lse=True,
        )  # fmt: skip
        grads = torch.autograd.grad(out, list(found.values()), dout)
        cpu = {at: grad.cpu() for at, grad in zip(found, grads, strict=True)}
        check(problem, Result(out.detach().cpu(), lse.detach().cpu(), cpu), f"{backend}, {name}")


@pytest.mark.parametrize("shape", pair_checks.SHAPES)
@pytest.mark.parametrize(("device", "backend"), PLACES)
def test_pairs(device: str, backend: str, shape: tuple[int, int]) -> None:
    inputs, bias = pair_checks.problem(150), pair_checks.make_bias(shape, 150)
    q, *others = (x.to(device) for x in inputs)
    if reason := load_backend(backend).unsupported(q, Features(8, biased=True)):
        pytest.skip(reason)
    got = pair_checks.run([q, *others], bias.to(device), backend=backend, partition="contiguous")
    want = pair_checks.truth(inputs, bias, pair_checks.seen_by(150))
    pair_checks.close({name: x.cpu() for name, x in got.items()}, want, (backend, shape))


@pytest.mark.parametrize(("device", "backend"), PLACES)
def test_8_bits(device: str, backend: str) -> None:
    problem = Problem(dtype=torch.bfloat16, **SHARED)
    q, k, v, _ = problem.inputs
    asked = Features(v.shape[3], quantized=True)
    if reason := load_backend(backend).unsupported(q.to(device), asked):
        pytest.skip(reason)
    with torch.no_grad():
        got = ringray.ring_attention(
            *(x.to(device) for x in (q, k, v)), quantize="fp8", backend=backend
        )
    want = testing.oracle(q, k, v, None, problem.seen, scale=problem.scale).out
    assert (got.cpu().double() - want).norm() < 0.06 * want.norm()
