"""One rank's attention problem, its computation by a backend, and the check of what came out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ringray_kernels import Blocks, State, testing
from ringray_kernels.api import Features, backward, delta, forward, load_backend
from ringray_kernels.bias import Bias
from ringray_kernels.dropout import Dropout
from ringray_kernels.intervals import Positions, intervals, visible_ranges
from ringray_kernels.merge import merge_sinks_, sink_gradients

DROPOUT_SEED = 0x2000000190000001  # two words, and the sign of one
NAN = float("nan")
# Marks of what a real GPU runs.
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="TRITON_INTERPRET is set"),
    pytest.mark.timeout(300, method="thread"),
]

MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {},
    "window 0": {"window": 0},
    "window 17": {"window": 17},
    "documents": {"cu": (0, 5, 5, 30, 61)},
    "full documents": {"causal": False, "cu": (0, 20, 61)},
    "window and documents": {"window": 9, "cu": (0, 1, 33, 61)},
    "global tokens": {"window": 6, "global_tokens": 5},
    "global tokens of documents": {
        "causal": False,
        "window": (4, 2),
        "global_tokens": 3,
        "cu": (0, 2, 33, 61),
    },
    "shared prefix": {"shared_prefix": 17, "cu": (0, 17, 30, 61)},
    "both sides": {"causal": False, "window": (9, 30)},
    "chunk and prefix": {"chunk": 25, "prefix": 20},
}


def interpreted(backend: str) -> bool:
    """Triton's interpreter takes about 10 ms a tile: fewer cases, the same kinds of them."""
    return backend == "triton" and bool(os.environ.get("TRITON_INTERPRET"))


def shared_heads(backend: str) -> dict[str, int]:
    """Batch and heads that are shared by queries, as few as tell them apart if interpreted."""
    few = interpreted(backend)
    return {"batch": 1 if few else 2, "heads": 2 if few else 4, "kv_heads": 1 if few else 2}


@dataclass(frozen=True)
class Problem:
    """One attention problem; ``cu`` are document boundaries."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    rows: int = 61
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    causal: bool = True
    window: int | tuple[int | None, int | None] | None = None
    cu: tuple[int, ...] | None = None
    seed: int = 0
    blocks: Blocks | int | None = None

    factor: float | None = None
    softcap: float | None = None
    value_dim: int | None = None
    with_sinks: bool = False
    global_tokens: int | None = None
    slopes: Tensor | None = None
    dropout_p: float = 0.0
    table: Tensor | None = None
    shared_prefix: int | None = None
    chunk: int | None = None
    prefix: int | None = None
    device: str = "cpu"

    @property
    def sinks(self) -> Tensor | None:
        return testing.make_sinks(self.heads, seed=self.seed) if self.with_sinks else None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.factor is None else self.factor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return testing.make_inputs(
            self.batch, self.heads, self.kv_heads, self.rows, self.head_dim, self.dtype,
            seed=self.seed, value_dim=self.value_dim, device=self.device,
        )  # fmt: skip

    @property
    def everyone(self) -> Tensor:
        """The positions of all keys."""
        return torch.arange(self.rows, device=self.device)

    @property
    def boundaries(self) -> Tensor | None:
        return None if self.cu is None else torch.tensor(self.cu, device=self.device)

    @property
    def mask(self) -> dict[str, Any]:
        return {
            "causal": self.causal, "window": self.window, "cu_seqlens": self.boundaries,
            "global_tokens": self.global_tokens, "shared_prefix": self.shared_prefix,
            "chunk": self.chunk, "prefix": self.prefix,
        }  # fmt: skip

    @property
    def seen(self) -> Tensor:
        return testing.visible(self.rows, **self.mask, device=self.device)

    def bias(self, keys: Tensor, grad: Tensor | None = None) -> Bias | None:
        if self.table is not None:
            into = None if grad is None else grad[None]
            return Bias(torch.arange(self.rows).int(), keys.int(), self.table[None], into)
        if self.slopes is None:
            return None
        slopes = self.slopes if self.slopes.dim() == 2 else self.slopes[None]
        return Bias(torch.arange(self.rows).int(), keys.int(), slopes)

    def intervals(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Of a mask of one range."""
        (one,) = self.ranges(keys)
        return one

    def ranges(self, keys: Tensor) -> list[tuple[Tensor, Tensor]]:
        ranges = visible_ranges(self.everyone, self.rows, **self.mask)
        rows = [intervals(low, high, keys) for low, high in ranges]
        return [(start[None], end[None]) for start, end in rows]


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values in other strides, with NaN in between."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    wide[..., ::2] = x
    rows = x.new_full((x.shape[0], x.shape[1], 2 * x.shape[2], x.shape[3]), float("nan"))
    rows[:, :, ::2] = x
    batches = x.new_full((2 * x.shape[0], *x.shape[1:]), float("nan"))
    batches[::2] = x
    odd = x.new_full((*x.shape[:-1], x.shape[-1] + 1), float("nan"))
    odd[..., 1:] = x
    return {
        "(B, S, H, D)": x.transpose(1, 2).contiguous().transpose(1, 2),
        "(B, H, D, S)": x.transpose(2, 3).contiguous().transpose(2, 3),
        "every other element": wide[..., ::2],
        "every other row": rows[:, :, ::2],
        "every other batch entry": batches[::2],
        "(D, H, B, S)": x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "not aligned": odd[..., 1:],
    }


LAYOUTS = list(layouts(torch.zeros(1, 1, 1, 1)))


@dataclass
class Result:
    """out, lse and gradients, in the dtypes that a ring would return."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


def compute(
    backend: str,
    problem: Problem,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    parts: list[Tensor] | None = None,
    *,
    with_out: bool = True,
) -> Result:
    """All hops of one rank: the keys come in ``parts`` (their positions), one call each. Without
    parts the backend gets k and v with the strides that they have."""
    q, k, v, dout = inputs
    more: dict[str, Any] = {"scale": problem.scale, "blocks": problem.blocks, "backend": backend}
    more |= {"softcap": problem.softcap}
    if problem.dropout_p:
        more |= {"dropout": Dropout(problem.dropout_p, DROPOUT_SEED)}
    rows = problem.everyone.int()
    state: State | None = None
    keys = [(part, k[:, :, part], v[:, :, part]) for part in parts or ()]
    keys = keys or [(problem.everyone, k, v)]
    hops = [(*part, *bounds) for part in keys for bounds in problem.ranges(part[0])]
    for i, (part, part_k, part_v, start, end) in enumerate(hops):
        last = i == len(hops) - 1
        state = forward(
            q, part_k, part_v, start, end, state=state,
            out_dtype=q.dtype if last else None, bias=problem.bias(part),
            at=Positions(rows, part.int()), **more,
        )  # fmt: skip
        assert state.out.dtype == (q.dtype if last else torch.float32)
        assert state.lse.dtype == torch.float32
    if problem.sinks is not None:
        merge_sinks_(*state, problem.sinks)
    delta = (dout.float() * state.out.float()).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, device=q.device) for x in (q, k, v))
    dtable = None if problem.table is None else torch.zeros(problem.table.shape)
    for part, part_k, part_v, start, end in hops:
        dk_part, dv_part = torch.zeros_like(dk[:, :, part]), torch.zeros_like(dv[:, :, part])
        backward(
            dout, q, part_k, part_v, state.lse, delta, start, end, dq=dq,
            dk=dk_part, dv=dv_part, out=state.out if with_out else None,
            bias=problem.bias(part, dtable), at=Positions(rows, part.int()), **more,
        )  # fmt: skip
        dk[:, :, part] += dk_part
        dv[:, :, part] += dv_part
    grads = {"dq": dq.to(q.dtype), "dk": dk.to(q.dtype), "dv": dv.to(q.dtype)}
    if dtable is not None:
        grads["dtable"] = dtable
    if problem.sinks is not None:
        grads["dsinks"] = sink_gradients(problem.sinks, state.lse, delta)
    return Result(state.out, state.lse, grads)


def truth(
    inputs: tuple[Tensor, ...], seen: Tensor, scale: float, *, causal: bool, **scoring: Any
) -> tuple[testing.Gradients, testing.Gradients]:
    """The right results in fp64, and the yardstick of their budget."""
    q, k, v, dout = inputs
    want = testing.oracle(q, k, v, dout, seen, scale=scale, **scoring)
    # SDPA scales after masking: what it gives for -q is right, and as exact.
    sign = -1 if scale <= 0 else 1
    arguments = {"scale": max(abs(scale), 1e-30), "causal": causal, **scoring}
    try:
        yard = testing.yardstick(sign * q, k, v, dout, seen, **arguments)
    except RuntimeError:
        if q.device.type == "cpu":
            raise
        # A GPU's fused calls do not take the problem.
        usual = testing.yardstick(*(x.cpu() for x in (sign * q, k, v, dout, seen)), **arguments)
        yard = testing.Gradients(*(None if x is None else x.to(q.device) for x in usual))  # type: ignore[arg-type]
    return want, yard._replace(dq=sign * yard.dq)


def check(problem: Problem, result: Result, case: str = "") -> None:
    """Within the error budget, in all four tensors; lse too."""
    inputs = problem.inputs
    want, yard = truth(
        inputs, problem.seen, problem.scale, causal=problem.causal, softcap=problem.softcap,
        sinks=problem.sinks, slopes=problem.slopes, table=problem.table,
        factors=testing.dropout_factors(inputs[0], problem.dropout_p, DROPOUT_SEED),
    )  # fmt: skip
    for name, got in (("out", result.out), *result.grads.items()):
        pair = getattr(want, name), getattr(yard, name)
        if name in ("dsinks", "dtable"):
            share = testing.sinks_share(got, *pair)
        else:
            share = testing.budget_share(got, *pair, inputs[3])
        assert share <= 1, f"{case} {problem}: {name} takes {share:.3f} of its budget"
    torch.testing.assert_close(result.lse, want.lse.float(), atol=2e-3, rtol=1e-4, msg=case)


def able(backend: str, problem: Problem) -> bool:
    """Tells whether ``backend`` computes ``problem``; otherwise it names those that do."""
    q, k, v, _ = problem.inputs
    everyone = torch.arange(problem.rows)
    bias = problem.bias(everyone)
    dropout = Dropout(problem.dropout_p, DROPOUT_SEED) if problem.dropout_p else None
    asked = Features(v.shape[3], problem.softcap, bias is not None, dropout is not None)
    if load_backend(backend).unsupported(q, asked) is None:
        return True
    start, end = problem.intervals(everyone)
    more: dict[str, Any] = {"scale": problem.scale, "softcap": problem.softcap, "bias": bias}
    more |= {"dropout": dropout, "at": Positions(everyone.int(), everyone.int())}
    with pytest.raises(ValueError, match=f"backend '{backend}': .*(aten|reference).* can"):
        forward(q, k, v, start, end, backend=backend, **more)
    return False


def hold(
    backend: str, problem: Problem, *parts: list[Tensor], with_out: bool | None = None
) -> None:
    """Checks what ``backend`` computes, of keys in each of ``parts``: by default of all at once."""
    if able(backend, problem):
        for keys in parts or ([torch.arange(problem.rows)],):
            passes_out = len(keys) == 1 if with_out is None else with_out
            result = compute(backend, problem, problem.inputs, keys, with_out=passes_out)
            check(problem, result, f"{len(keys)} parts, out {passes_out}")


def both(
    backend: str, inputs: Any, start: Tensor, end: Tensor, *, filled: float = 0.0, **more: Any
) -> list[Tensor]:
    """out, lse, dq, dk and dv of one hop; gradients are added to what is there."""
    q, k, v, dout = inputs
    out, lse = forward(q, k, v, start, end, out_dtype=q.dtype, backend=backend, **more)
    rows = delta(dout, out, lse, backend=backend)
    grads = [torch.full(x.shape, filled, device=q.device) for x in (q, k, v)]
    into = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    backward(dout, q, k, v, lse, rows, start, end, out=out, backend=backend, **into, **more)
    return [out, lse, *grads]


def hidden_may_hold_anything(
    backend: str, inputs: Any, start: Tensor, end: Tensor, **more: Any
) -> None:
    """q and dout of rows that see nothing, k and v of keys that no row sees."""
    positions = torch.arange(inputs[1].shape[2], device=start.device)
    seen = (positions >= start[0, :, None]) & (positions < end[0, :, None])
    rows, keys = ~seen.any(1), ~seen.any(0)
    clean = both(backend, inputs, start, end, **more)
    for poison in (NAN, float("inf")):
        bad = [x.clone() for x in inputs]
        for x, which in zip(bad, (rows, keys, keys, rows), strict=True):
            x[:, :, which] = poison
        got = both(backend, bad, start, end, **more)
        for x, want in zip(got, clean, strict=True):
            assert torch.equal(x, want)
            assert not x.isnan().any()
        for x, which in zip(got, (rows, rows, rows, keys, keys), strict=True):
            assert (x[:, :, which] == (-torch.inf if x is got[1] else 0)).all()


def nobody_sees_anything(backend: str, problem: Problem, at: int) -> None:
    """The position of empty intervals and the content of unseen keys must not matter."""
    q, k, v, dout = problem.inputs
    k.fill_(NAN)
    v.fill_(NAN)
    nothing = torch.full((1, problem.rows), at, dtype=torch.int32, device=problem.device)
    earlier = [torch.randn(shape, device=problem.device) for shape in (q.shape, q.shape[:3])]
    options: dict[str, Any] = {"scale": problem.scale, "backend": backend, "blocks": problem.blocks}
    for out_dtype in (q.dtype, torch.float32):
        out, lse = forward(q, k, v, nothing, nothing, out_dtype=out_dtype, **options)
        assert out.dtype == out_dtype
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        state = State(*(x.clone() for x in earlier))
        out, lse = forward(q, k, v, nothing, nothing, state=state, out_dtype=out_dtype, **options)
        torch.testing.assert_close(out, earlier[0].to(out_dtype))
        torch.testing.assert_close(lse, earlier[1])
    dq, dk, dv = grads = [torch.ones(x.shape, device=problem.device) for x in (q, k, v)]
    backward(
        dout, q, k, v, earlier[1], earlier[1], nothing, nothing, dq=dq, dk=dk, dv=dv, **options
    )
    assert all((x == 1).all() for x in grads)
