"""One rank's part of ring attention: validated functions that dispatch to a backend by name.

Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), Sq query rows, Sk key
rows, D head dim of q and k, Dv of v and the output. All tensors may have any strides.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ringray_kernels import dtypes
from ringray_kernels.backends import BACKENDS, PREFERRED
from ringray_kernels.config import Blocks

DTYPES = tuple(map(dtypes.torch_dtype, dtypes.DTYPES))
MAX_HEAD_DIM = 512
LARGEST_SCALE = torch.finfo(torch.float32).max
LEAST_SOFTCAP = 1e-30  # what divides by it stays far from the end of fp32


class State(NamedTuple):
    """Attention over the keys of the hops so far.

    ``out`` (B, Hq, Sq, Dv), normalised, fp32 between hops; ``lse`` (B, Hq, Sq), fp32, natural log,
    -inf with ``out`` 0 on rows that have seen no key.
    """

    out: Tensor
    lse: Tensor


class Operands(NamedTuple):
    """The checked arguments of both passes; see ``forward``. ``blocks``: as the backend takes
    them."""

    q: Tensor
    k: Tensor
    v: Tensor
    start: Tensor
    end: Tensor
    scale: float
    blocks: Any
    softcap: float | None = None


class Features(NamedTuple):
    """What a problem asks of a backend beyond plain scores and one head dim. ``value_dim``: head
    dim of v, None if it is that of q."""

    value_dim: int | None = None
    softcap: float | None = None


PLAIN = Features()


def features(v: Tensor, softcap: float | None = None) -> Features:
    """Returns what a problem with values ``v`` asks of a backend."""
    return Features(v.shape[-1], softcap)


class BackwardOperands(NamedTuple):
    """The further arguments of a backward pass, checked; see ``backward``."""

    dout: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Backend(Protocol):
    """The functions of a backend module; ``reference.py`` is the readable example.

    ``BLOCKS``: the type of ``blocks`` that it takes, besides None.
    """

    BLOCKS: type

    def unsupported(self, q: Tensor, asked: Features = ...) -> str | None:
        """Returns why this backend cannot compute ``asked`` on tensors like ``q``, or None."""

    def forward(self, operands: Operands, state: State | None, out_dtype: torch.dtype) -> State: ...
    def backward(self, operands: Operands, given: BackwardOperands) -> None: ...
    def delta(self, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor: ...


def backend_names() -> tuple[str, ...]:
    """Returns the names that ``backend=`` accepts, ``auto`` included."""
    return ("auto", *BACKENDS)


def resolve_backend(name: str, q: Tensor, asked: Features = PLAIN) -> str:
    """Returns the backend that ``name`` means for tensors like ``q`` and what is ``asked``.

    Raises:
        ValueError: unknown name, or the named backend cannot compute that; names those that can.
    """
    if name != "auto":
        if not isinstance(name, str) or name not in BACKENDS:
            close = difflib.get_close_matches(str(name), backend_names(), n=1)
            raise ValueError(
                f"backend: got {name!r}, expected one of {', '.join(backend_names())}"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )
        reason = load_backend(name).unsupported(q, asked)
        if reason:
            able = ", ".join(_usable((one for one in BACKENDS if one != name), q, asked))
            raise ValueError(f"backend {name!r}: {reason}" + (f"; {able} can" if able else ""))
        return name
    for name in _usable(PREFERRED.get(q.device.type, ()), q, asked):
        return name
    raise ValueError(
        f"no backend computes {q.dtype} on {q.device.type} with head dim {q.shape[-1]}"
    )


def _usable(names: Iterable[str], q: Tensor, asked: Features) -> Iterator[str]:
    """Yields those of ``names`` that are installed and compute ``asked`` on tensors like ``q``."""
    for name in names:
        with contextlib.suppress(ImportError):
            if load_backend(name).unsupported(q, asked) is None:
                yield name


def load_backend(name: str) -> Backend:
    """Imports the module of a registered backend."""
    return _imported(BACKENDS[name])


@lru_cache
def _imported(module: str) -> Backend:
    return cast("Backend", importlib.import_module(module))  # which takes microseconds to find it


def _expect(
    name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: got {tensor.dtype}, expected {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {device}")


def not_plain(x: Tensor) -> str | None:
    """Returns what ``x`` is instead of a plain, dense tensor, whose elements can be sent, or
    None."""
    dispatches = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
    waits = hasattr(x, "trigger_wait")  # the result of a collective: plain, but not yet there
    if (dispatches and not waits) or x.is_nested or x.layout != torch.strided or x.is_quantized:
        return (
            f"a {type(x).__name__} of layout {x.layout}, expected a plain, dense tensor "
            "(to_local() of a DTensor, to_dense() of a sparse one)"
        )
    return None


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Checks shapes, dtypes, devices and head counts of one attention problem.

    Raises:
        ValueError: with the given and the expected value.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: got {type(tensor).__name__}, expected a tensor")
        if reason := not_plain(tensor):
            raise ValueError(f"{name}: got {reason}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected 4 dimensions (B, H, S, D)"
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name}: got {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: got {tensor.dtype} on {tensor.device}, "
                f"expected q's {q.dtype} on {q.device}"
            )
        if 0 in tensor.shape:
            raise ValueError(f"{name}: got an empty tensor of shape {tuple(tensor.shape)}")
    batch, heads, _, head_dim = q.shape
    kv_heads, key_rows = k.shape[1], k.shape[2]
    _expect("k", k, (batch, kv_heads, key_rows, head_dim), q.dtype, q.device)
    _expect("v", v, (batch, kv_heads, key_rows, v.shape[3]), q.dtype, q.device)
    if heads % kv_heads:
        raise ValueError(
            f"heads: got {heads} query heads and {kv_heads} key/value heads, "
            "expected query heads to be a multiple of key/value heads"
        )
    if (widest := max(head_dim, v.shape[3])) > MAX_HEAD_DIM:
        raise ValueError(f"head dim: got {widest}, expected at most {MAX_HEAD_DIM}")


def check_blocks(blocks: object, backend: str) -> None:
    """Raises ValueError unless ``blocks`` is None or of the type of the resolved backend."""
    kind = load_backend(backend).BLOCKS
    if blocks is None or (kind is Blocks and isinstance(blocks, Blocks)):
        return
    if kind is int and isinstance(blocks, int) and not isinstance(blocks, bool) and blocks >= 1:
        return
    expected = "a ringray_kernels.Blocks" if kind is Blocks else "query rows per call, at least 1"
    raise ValueError(f"blocks: got {blocks!r}, backend {backend!r} takes None or {expected}")


def unusable_scale(scale: object) -> str | None:
    """Returns why scores, which are fp32, cannot be multiplied by ``scale``, or None."""
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if number and abs(cast("float", scale)) <= LARGEST_SCALE:  # not so for NaN
        return None
    return f"scale: got {scale!r}, expected None or a finite number that fp32 holds"


def unusable_softcap(softcap: object) -> str | None:
    """Returns why scores cannot be capped at ``softcap``, or None."""
    number = isinstance(softcap, int | float) and not isinstance(softcap, bool)
    if softcap is None or (number and LEAST_SOFTCAP <= cast("float", softcap) <= LARGEST_SCALE):
        return None
    return f"softcap: got {softcap!r}, expected None or a finite number of at least {LEAST_SOFTCAP}"


def _checked(operands: Operands, backend: str) -> Backend:
    """Checks the problem and returns its backend."""
    q, k, v, start, end, scale, blocks, softcap = operands
    check_qkv(q, k, v)
    if wrong := unusable_scale(scale) or unusable_softcap(softcap):
        raise ValueError(wrong)
    rows = (
        start.shape[0] if start.dim() == 2 and start.shape[0] in (1, q.shape[0]) else 1,
        q.shape[2],
    )
    _expect("start", start, rows, torch.int32, q.device)
    _expect("end", end, rows, torch.int32, q.device)
    backend = resolve_backend(backend, q, features(v, softcap))
    check_blocks(blocks, backend)
    return load_backend(backend)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    state: State | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: Blocks | int | None = None,
    backend: str = "auto",
) -> State:
    """Computes attention of ``q`` over the key rows ``[start, end)`` and merges it into ``state``.

    Args:
        q: (B, Hq, Sq, D), fp32, bf16 or fp16; ``k``: (B, Hkv, Sk, D), ``v``: (B, Hkv, Sk, Dv), the
            same dtype.
        start, end: int32 (B or 1, Sq), half-open rows of k that each query row sees, each
            non-decreasing along the rows.
        scale: factor on q . k before the softmax: any finite number that fp32 holds.
        softcap: scores s become softcap * tanh(s / softcap), after the scale; None: they stay.
        state: the result of earlier hops, fp32; it is consumed (its tensors may be reused).
        out_dtype: dtype of the returned ``out``; None means fp32. Set it on the last hop.
        blocks: the partition of the work: query rows per fused call for ``aten``, a ``Blocks`` for
            ``triton``, None for the default of the backend.
        backend: ``auto`` or a name of ``ringray_kernels.backends``.

    Returns:
        State: out (B, Hq, Sq, Dv) in ``out_dtype``, lse (B, Hq, Sq) fp32.

    Raises:
        ValueError: wrong shapes, dtypes or names; with the expected ones.
    """
    operands = Operands(q, k, v, start, end, scale, blocks, softcap)
    module = _checked(operands, backend)
    if state is not None:
        _expect("state.out", state.out, (*q.shape[:3], v.shape[3]), torch.float32, q.device)
        _expect("state.lse", state.lse, q.shape[:3], torch.float32, q.device)
    return module.forward(operands, state, out_dtype or torch.float32)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    out: Tensor | None = None,
    blocks: Blocks | int | None = None,
    backend: str = "auto",
) -> None:
    """Adds the gradients of one hop to ``dq``, ``dk``, ``dv`` in place.

    Args:
        dout: (B, Hq, Sq, Dv), the gradient of the *global* output.
        q, k, v, start, end, scale, softcap, blocks, backend: as in ``forward``.
        lse, delta: fp32 (B, Hq, Sq), *global*: lse over all keys of the sequence, and
            what ``delta`` returns. Rows with lse = -inf must have empty intervals.
        dq: fp32 (B, Hq, Sq, D); ``dk``, ``dv``: fp32, shaped as k and v.
        out: the global output in q's dtype, if available and ``delta`` is its rowsum with dout:
            fused calls compute delta themselves, and otherwise get a substitute with its rowsum.

    Raises:
        ValueError: wrong shapes, dtypes or names; with the expected ones.
    """
    operands = Operands(q, k, v, start, end, scale, blocks, softcap)
    module = _checked(operands, backend)
    of_rows, results = q.shape[:3], (*q.shape[:3], v.shape[3])
    for name, tensor, shape, dtype in (
        ("dout", dout, results, q.dtype), ("out", out, results, q.dtype),
        ("lse", lse, of_rows, torch.float32), ("delta", delta, of_rows, torch.float32),
        ("dq", dq, q.shape, torch.float32), ("dk", dk, k.shape, torch.float32),
        ("dv", dv, v.shape, torch.float32),
    ):  # fmt: skip
        if tensor is not None:
            _expect(name, tensor, shape, dtype, q.device)
    module.backward(operands, BackwardOperands(dout, out, lse, delta, dq, dk, dv))


def delta(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Returns rowsum(dout * out) - dlse, all of the global output that ``backward`` needs.

    Args:
        dout, out: (B, Hq, Sq, Dv), the same dtype.
        lse: fp32 (B, Hq, Sq); rows where it is -inf get 0, for any values of the others there.
        dlse: gradient of lse, fp32 (B, Hq, Sq): a score's share of lse is its weight, as in delta.

    Returns:
        fp32 (B, Hq, Sq).

    Raises:
        ValueError: wrong shapes, dtypes or names; with the expected ones.
    """
    _expect("dout", dout, out.shape, out.dtype, out.device)
    _expect("lse", lse, out.shape[:3], torch.float32, out.device)
    found = load_backend(resolve_backend(backend, out)).delta(dout, out, lse)
    if dlse is None:
        return found
    _expect("dlse", dlse, out.shape[:3], torch.float32, out.device)
    return found.sub_(dlse.masked_fill(lse == -torch.inf, 0.0))
