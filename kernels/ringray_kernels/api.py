"""One rank's part of ring attention: validated functions that dispatch to a backend by name.

Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), Sq query rows, Sk key
rows, D head dim of q and k, Dv of v and the output. All tensors may have any strides.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ringray_kernels.backends import BACKENDS, BLOCKS, DOWNLOADED, PREFERRED
from ringray_kernels.bias import Bias
from ringray_kernels.checks import (
    DTYPES,
    TensorKind,
    check_qkv,
    expect,
    unusable_scale,
    unusable_softcap,
)
from ringray_kernels.config import Blocks
from ringray_kernels.dropout import Dropout, unusable_dropout
from ringray_kernels.intervals import Positions
from ringray_kernels.modes import without_modes
from ringray_kernels.quantize import DTYPE, Scales, dequantized


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
    bias: Bias | None = None
    dropout: Dropout | None = None
    at: Positions | None = None
    scales: Scales | None = None

    @property
    def extended(self) -> bool:
        """Returns whether a weight is more than the exponential of a scaled product."""
        return any(x is not None for x in (self.softcap, self.bias, self.dropout))

    def widened(self) -> Operands:
        """Returns the operands without scales: q, k and v in bf16 if they are quantized."""
        if self.scales is None:
            return self
        q, k, v = map(dequantized, (self.q, self.k, self.v), self.scales)
        return self._replace(q=q, k=k, v=v, scales=None)


class Features(NamedTuple):
    """The demands of a problem beyond plain scores and one head dim. ``value_dim``: head
    dim of v, None if it is that of q; ``biased``: scores have a bias; ``dropout``: weights are
    dropped; ``quantized``: q, k and v have scales."""

    value_dim: int | None = None
    softcap: float | None = None
    biased: bool = False
    dropout: bool = False
    quantized: bool = False

    @property
    def extended(self) -> bool:
        """See ``Operands.extended``."""
        return self.softcap is not None or self.biased or self.dropout


PLAIN = Features()


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
    """The functions of a backend module; ``reference.py`` is the readable example."""

    def unsupported(self, q: TensorKind, asked: Features = ...) -> str | None:
        """Returns why this backend cannot compute ``asked`` on tensors like ``q``, or None."""

    def forward(self, operands: Operands, state: State | None, out_dtype: torch.dtype) -> State: ...
    def backward(self, operands: Operands, tensors: BackwardOperands) -> None: ...
    def delta(self, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor: ...


def backend_names() -> tuple[str, ...]:
    """Returns the names that ``backend=`` accepts, ``auto`` included."""
    return ("auto", *BACKENDS)


def resolve_backend(name: str, q: TensorKind, asked: Features = PLAIN) -> str:
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
            others = (other for other in BACKENDS if other not in (name, *DOWNLOADED))
            able = ", ".join(_usable(others, q, asked))
            raise ValueError(f"backend {name!r}: {reason}" + (f"; {able} can" if able else ""))
        return name
    for name in _usable(PREFERRED.get(q.device.type, ()), q, asked):
        return name
    raise ValueError(
        f"no backend computes {q.dtype} on {q.device.type} with head dim {q.shape[-1]}"
    )


def _usable(names: Iterable[str], q: TensorKind, asked: Features) -> Iterator[str]:
    """Yields those of ``names`` that are installed and compute ``asked`` on tensors like ``q``."""
    for name in names:
        with contextlib.suppress(ImportError):
            if load_backend(name).unsupported(q, asked) is None:
                yield name


def load_backend(name: str) -> Backend:
    """Imports a registered backend."""
    return _imported(BACKENDS[name])


@lru_cache
def _imported(path: str) -> Backend:
    name, _, member = path.partition(":")
    module = importlib.import_module(name)  # which takes microseconds to find it
    return cast("Backend", getattr(module, member) if member else module)


def check_blocks(blocks: object, backend: str) -> None:
    """Raises ValueError unless ``blocks`` is None or of the kind of the resolved backend."""
    tiled = BLOCKS[backend] == "tiles"
    if blocks is None or (tiled and isinstance(blocks, Blocks)):
        return
    rows = isinstance(blocks, int) and not isinstance(blocks, bool) and blocks >= 1
    if rows and not tiled:
        return
    expected = "a ringray_kernels.Blocks" if tiled else "query rows per call, at least 1"
    raise ValueError(f"blocks: got {blocks!r}, backend {backend!r} takes None or {expected}")


def _checked(operands: Operands, backend: str) -> Backend:
    """Checks the problem and returns its backend."""
    q, k, v, start, end, scale, blocks, softcap, bias, dropout, positions, scales = operands
    check_qkv(q, k, v, DTYPES if scales is None else (DTYPE, torch.uint8))
    for name, x, of_rows in zip("qkv", (q, k, v), scales or (), strict=False):
        expect(f"scales of {name}", of_rows, x.shape[:3], torch.float32, q.device)
    if wrong := unusable_scale(scale) or unusable_softcap(softcap):
        raise ValueError(wrong)
    if dropout is not None:
        if wrong := unusable_dropout(dropout.p, dropout.seed):
            raise ValueError(wrong)
        if positions is None:
            raise ValueError("at: got None with dropout, expected the Positions of rows and keys")
    if positions is not None:
        expect("at.rows", positions.rows, (q.shape[2],), torch.int32, q.device)
        expect("at.keys", positions.keys, (k.shape[2],), torch.int32, q.device)
    # Bounds hold for all batch entries, or there are some for each.
    rows = (
        start.shape[0] if start.dim() == 2 and start.shape[0] in (1, q.shape[0]) else 1,
        q.shape[2],
    )
    expect("start", start, rows, torch.int32, q.device)
    expect("end", end, rows, torch.int32, q.device)
    if bias is not None:
        bias.check(q, k)
    asked = Features(v.shape[3], softcap, bias is not None, dropout is not None, scales is not None)
    backend = resolve_backend(backend, q, asked)
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
    bias: Bias | None = None,
    dropout: Dropout | None = None,
    at: Positions | None = None,
    scales: Scales | None = None,
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
        bias: is added to the scores, after the softcap.
        dropout: weights that are dropped, see ``ringray_kernels.dropout``; None: all stay.
        at: global positions of rows and keys, on which dropout depends.
        scales: of q, k and v, which then are e4m3 or its bytes; see ``ringray_kernels.quantize``.
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
    operands = Operands(q, k, v, start, end, scale, blocks, softcap, bias, dropout, at, scales)
    module = _checked(operands, backend)
    if scales is not None:  # e4m3 travels as bytes, which every library of messages knows
        operands = operands._replace(q=q.view(DTYPE), k=k.view(DTYPE), v=v.view(DTYPE))
    if state is not None:
        expect("state.out", state.out, (*q.shape[:3], v.shape[3]), torch.float32, q.device)
        expect("state.lse", state.lse, q.shape[:3], torch.float32, q.device)
    with without_modes(q.device):
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
    bias: Bias | None = None,
    dropout: Dropout | None = None,
    at: Positions | None = None,
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
        q, k, v, start, end, scale, softcap, bias, dropout, at, blocks, backend: as in
            ``forward``.
        lse, delta: fp32 (B, Hq, Sq), *global*: lse over all keys of the sequence, and
            what ``delta`` returns. Rows with lse = -inf must have empty intervals.
        dq: fp32 (B, Hq, Sq, D); ``dk``, ``dv``: fp32, shaped as k and v.
        out: the global output in q's dtype, if available and ``delta`` is its rowsum with dout:
            fused calls compute delta themselves, and otherwise get a substitute with its rowsum.

    Raises:
        ValueError: wrong shapes, dtypes or names; with the expected ones.
    """
    operands = Operands(q, k, v, start, end, scale, blocks, softcap, bias, dropout, at)
    module = _checked(operands, backend)
    of_rows, results = q.shape[:3], (*q.shape[:3], v.shape[3])
    for name, tensor, shape in (("dout", dout, results), ("out", out, results)):
        if tensor is not None:
            expect(name, tensor, shape, q.dtype, q.device)
    sums = (("lse", lse, of_rows), ("delta", delta, of_rows))
    gradients = (("dq", dq, q.shape), ("dk", dk, k.shape), ("dv", dv, v.shape))
    for name, tensor, shape in (*sums, *gradients):
        expect(name, tensor, shape, torch.float32, q.device)
    with without_modes(q.device):
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
    expect("dout", dout, out.shape, out.dtype, out.device)
    expect("lse", lse, out.shape[:3], torch.float32, out.device)
    if dlse is not None:
        expect("dlse", dlse, out.shape[:3], torch.float32, out.device)
    with without_modes(out.device):
        # The gradient of lse by a score is its weight: dlse joins delta with the other sign.
        rowsums = load_backend(resolve_backend(backend, out)).delta(dout, out, lse)
        return rowsums if dlse is None else rowsums.sub_(dlse.masked_fill(lse == -torch.inf, 0.0))
