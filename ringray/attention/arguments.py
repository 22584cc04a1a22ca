"""Arguments of one call: checked, resolved to a ``RankProblem``, agreed on by all ranks.

After the first call with the same arguments and tensors of the same kind one lookup finds all that
follows from them. The least recently used problems are forgotten beyond a bound.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.open_options import filled
from ringray.attention.per_head import (
    Besides,
    Slopes,
    check_sinks,
    check_slopes,
    check_table,
    head_slopes,
    share,
)
from ringray.attention.problem import RankProblem
from ringray.base.provenance import version
from ringray.base.units import plain
from ringray.comm.ring import Comm
from ringray.traffic import walk
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask
from ringray_kernels.api import Features, check_blocks, resolve_backend
from ringray_kernels.checks import check_qkv, unusable_scale, unusable_softcap
from ringray_kernels.config import Blocks
from ringray_kernels.dropout import POSITIONS, SEEDS, unusable_dropout
from ringray_kernels.intervals import capturing, derived

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # of ids and labels
Documents = tuple[int, ...] | tuple[tuple[int, ...], ...] | None  # of all batch rows, or of each


class Options(NamedTuple):
    """The arguments of ``ringray.ring_attention``, as given, except tensors and the group."""

    partition: str
    causal: bool
    window: int | tuple[int | None, int | None] | None
    chunk: int | None
    prefix: tuple[int, ...] | None
    global_tokens: int | None
    seq_len: int | None
    scale: float | None
    softcap: float | None
    dropout_p: float
    quantize: str | None
    transport: str
    backward: str
    backend: str
    return_lse: bool
    blocks: Blocks | int | None


# On which all ranks agree:
_OF_MASK = ("causal", "window", "chunk", "prefix", "global_tokens", "seq_len")
_OF_PROBLEM = ("scale", "softcap", "dropout_p", "backward", "backend")
MOST_PROBLEMS = 256
MOST_POSITIONS = 1 << 24  # of all problems: each takes up to 16 bytes for intervals and inverses
_prepared: dict[Any, tuple[RankProblem, AgreedCall]] = {}  # the least recently used first


def resolve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    besides: Besides,
    options: Options,
    comm: Comm,
    *,
    needs_grad: bool,
    refused: str | None = None,
    seed: int | None = None,
) -> tuple[RankProblem, int]:
    """Returns the problem of one forward pass, on which all ranks agree, and the call's number.

    ``refused``: a mistake that the caller has found already. ``seed``: of dropout; None is one from
    torch's generator on the CPU.

    Raises:
        ValueError: on every rank, if the problem is wrong on one or not the same on all.
    """
    with refusing(comm):
        if refused is not None:
            raise ValueError(refused)
        problem, call = prepare(q, k, v, besides, options, comm, needs_grad=needs_grad)
        if wrong := unusable_dropout(options.dropout_p, seed):
            raise ValueError(wrong)
        if problem.dropout_p and capturing(q.device):
            raise RuntimeError(
                "ring_attention: got dropout while a CUDA graph is captured, expected none: each "
                "replay would drop the same weights"
            )
    if problem.dropout_p:
        if seed is None:
            seed = int(torch.randint(SEEDS, (), dtype=torch.int64, device="cpu"))
        problem, call = problem.seeded(seed), call.but(dropout_seed=seed)
    number = agree(comm, call)
    comm.open(q.device)
    return problem, number


def prepare(
    q: Tensor, k: Tensor, v: Tensor, besides: Besides, options: Options, comm: Comm, *,
    needs_grad: bool,
) -> tuple[RankProblem, AgreedCall]:  # fmt: skip
    """Returns what follows from the arguments, found again if a call before had equal ones."""
    dense = isinstance(q, Tensor) and not q.is_nested and q.dim()
    documents = document_boundaries(besides.cu_seqlens, len(q) if dense else 1)
    slopes, sinks = head_slopes(besides.alibi_slopes), besides.sinks
    if dense and q.dim() == 4:
        check_table(besides, q)
    key: tuple[object, ...] | None = None
    prepared: tuple[RankProblem, AgreedCall] | None = None
    try:
        more = [x for x in (sinks, besides.distance_bias) if x is not None]
        tensors = (q, k, v, *more)
        kinds = [(type(x), x.shape, x.dtype, x.device, x.layout) for x in tensors]
        key = (
            *kinds, documents, slopes, comm.rank, comm.world_size, needs_grad,
            torch.get_num_threads(), options, *map(type, options),  # True is no 1
        )  # fmt: skip
        prepared = _prepared.pop(key, None)
    except (AttributeError, RuntimeError, TypeError):
        pass  # of arguments that are refused below
    if prepared is None:
        check_qkv(q, k, v)
        check_sinks(sinks, q)
        check_slopes(slopes, len(q), q.shape[1], q.shape[2] * comm.world_size)
        if wrong := mistake(options, types_only=True):
            raise ValueError(wrong)
        quantized = options.quantize is not None
        if quantized and needs_grad:
            raise ValueError(
                f"quantize: got {options.quantize!r} where gradients are needed, expected None, or "
                "a call under torch.no_grad(): backward passes have 16 or 32 bits"
            )
        biased = slopes is not None or besides.distance_bias is not None
        asked = Features(v.shape[3], options.softcap, biased, options.dropout_p > 0, quantized)
        options = filled(q, k, asked, documents, options, comm, needs_grad=needs_grad)
        problem = _describe(q, k, v, asked, documents, slopes, options, comm)
        call = _call(problem, q, k, v, besides, slopes, options.transport, needs_grad)
        prepared = problem, call
        _forget()
    _prepared[key] = prepared
    comm.check(q.device, staged=prepared[0].exchange.staged)
    return prepared


def _forget() -> None:
    """Forgets the least recently used problems beyond the bounds, but not the two newest."""
    while len(_prepared) > 2:
        problems = [problem for problem, _ in _prepared.values()]
        positions = sum(one.layout.padded * len(one.mask.rows) for one in problems)
        if len(_prepared) <= MOST_PROBLEMS and positions <= MOST_POSITIONS:
            break
        del _prepared[next(iter(_prepared))]


def _describe(
    q: Tensor, k: Tensor, v: Tensor, asked: Features, documents: Documents,
    slopes: Slopes | None, options: Options, comm: Comm,
) -> RankProblem:  # fmt: skip
    """Returns the problem of tensors like ``q`` (B, Hq, S, D), ``k`` (B, Hkv, S, D) and ``v`` (B,
    Hkv, S, Dv).

    Raises:
        ValueError: what was given and what is expected.
    """
    batch, heads, rows, head_dim = q.shape
    kv_heads, ranks = k.shape[1], comm.world_size
    if k.shape[2] != rows:
        raise ValueError(f"k: got {k.shape[2]} rows, expected q's {rows}: shards are equal")
    if wrong := mistake(options):
        raise ValueError(wrong)
    partition, scale, transport = options.partition, options.scale, options.transport
    blocks, softcap, dropout_p = options.blocks, options.softcap, float(options.dropout_p)
    if dropout_p and (size := rows * ranks) > POSITIONS:
        raise ValueError(f"dropout_p: got {size} positions, expected at most {POSITIONS}")
    length = partitions.true_length(partition, options.seq_len, rows, ranks)
    backend = resolve_backend(options.backend, q, asked)
    check_blocks(blocks, backend)
    exchange = transports.plan(transport, ranks, heads, kv_heads)
    fold = exchange.fold
    sizes = heads // fold, kv_heads // fold, head_dim, v.shape[3]
    mask = Mask(
        length, options.causal, options.window, documents, options.chunk, options.prefix,
        options.global_tokens,
    )  # fmt: skip
    problem = RankProblem(
        layout=Layout(partition, rows * ranks, ranks // fold, fold),
        rank=comm.rank // fold,
        mask=mask,
        exchange=exchange,
        backward=walk.resolve_backward(options.backward, transport, walks=exchange.walks),
        costs=walk.costs(q.element_size(), batch, *sizes, quantized=asked.quantized),
        scale=head_dim**-0.5 if scale is None else float(scale),
        backend=backend,
        blocks=blocks,
        return_lse=options.return_lse,
        softcap=None if softcap is None else float(softcap),
        slopes=share(slopes, fold, comm.rank % fold),
        dropout_p=dropout_p,
        first_head=comm.rank % fold * (heads // fold),
        quantized_from=q.dtype if asked.quantized else None,
    )
    _ = problem.walks  # raises where the backward walk is impossible
    return problem


def mistake(options: Options, *, types_only: bool = False) -> str | None:
    """Returns the first mistake in numbers and flags, or None. ``types_only``: values are
    not checked."""
    window, prefix = cast("Any", options.window), options.prefix
    sides = isinstance(window, tuple) and len(window) == 2
    if sides and not all(whole(side, 0) for side in window if side is not None):
        return f"window: got {window!r}, expected two integers of at least 0, None for all keys"
    if prefix is not None and not (isinstance(prefix, tuple) and all(whole(x, 0) for x in prefix)):
        return f"prefix: got {prefix!r}, expected an integer of at least 0, or a list of them"
    for name, least in (("window", 0), ("chunk", 1), ("global_tokens", 1), ("seq_len", 1)):
        value = None if name == "window" and sides else getattr(options, name)
        if value is not None and not whole(value, None if types_only else least):
            more = " or (left, right)" if name == "window" else ""
            return f"{name}: got {value!r}, expected None or an integer of at least {least}{more}"
    for name in ("causal", "return_lse"):
        if not isinstance(getattr(options, name), bool):
            return f"{name}: got {getattr(options, name)!r}, expected True or False"
    if options.quantize is not None and options.quantize != "fp8":
        return f"quantize: got {options.quantize!r}, expected None or 'fp8'"
    scale = None if options.scale is None else unusable_scale(options.scale)
    return scale or unusable_softcap(options.softcap) or unusable_dropout(options.dropout_p, None)


def whole(value: object, least: int | None) -> bool:
    """Tells whether ``value`` is an integer, of at least ``least``."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    return integer and (least is None or least <= value < 1 << 62)  # type: ignore[operator]


def several(given: Any) -> Any:
    """Returns a list or a tuple of numbers as a tuple, and one number as it is."""
    if isinstance(given, list | tuple):
        return tuple([plain(x) for x in given])
    return plain(given)


def document_boundaries(cu_seqlens: Any, batch: int) -> Documents:
    """Returns ``cu_seqlens`` as a tuple, of tuples if each batch row has its own; ``Mask`` checks
    its values."""
    given = boundaries(cu_seqlens)
    if given is None:
        return None
    if not isinstance(given, Tensor):
        raise ValueError(f"cu_seqlens: got {given!r}, expected integers in a tensor or a list")
    by_row = given.dim() == 2 and len(given) == batch
    if not (by_row or given.dim() == 1) or given.is_floating_point() or given.dtype is torch.bool:
        raise ValueError(
            f"cu_seqlens: got {given.dtype} of shape {tuple(given.shape)}, expected a "
            f"1-D tensor of integers, or a 2-D one with a row for each of {batch} batch rows"
        )
    values = on_host(given).tolist()
    return tuple(map(tuple, values)) if by_row else tuple(values)


def on_host(x: Tensor) -> Tensor:
    """Returns ``x`` in host memory; one on a device is read once, and again after it has
    changed."""
    return x if x.device.type == "cpu" else derived(x, x, "on host", x.cpu)


def boundaries(cu_seqlens: Any) -> Any:
    """Returns a list, a tuple or an array of integers as a tensor, and anything else as it is. Of
    several rows (lists, tensors, arrays) the shorter ones are filled with their last boundary:
    documents without a token."""
    if cu_seqlens is None or isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    try:
        if hasattr(cu_seqlens, "__array__"):
            return torch.as_tensor(cu_seqlens, device="cpu")
        # Arrays are not read: a compiler may trace this.
        if not any(isinstance(x, list | tuple) or getattr(x, "ndim", 0) for x in cu_seqlens):
            return _integers(cu_seqlens)
        rows = [_integers(row) for row in cu_seqlens]
        most = max(map(len, rows))
        return torch.stack([torch.cat([x, x[-1:].expand(most - len(x))]) for x in rows])
    except (TypeError, ValueError, RuntimeError):  # of torch, too: integers beyond 64 bits
        return cu_seqlens


def _integers(row: Any) -> Tensor:
    if getattr(row, "ndim", 0):
        return torch.as_tensor(row, device="cpu")
    values = [plain(x) for x in row]
    if not all(type(x) is int for x in values):
        raise TypeError
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _call(
    problem: RankProblem, q: Tensor, k: Tensor, v: Tensor, besides: Besides,
    slopes: Slopes | None, transport: str, needs_grad: bool,
) -> AgreedCall:  # fmt: skip
    blocks = problem.blocks
    # Blocks that configure nothing are the default.
    compared = (str(blocks) or None) if isinstance(blocks, Blocks) else blocks
    return AgreedCall(
        "ring_attention",
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        rows_per_rank=q.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=q.dtype,
        partition=problem.layout.partition,
        cu_seqlens=problem.mask.documents,
        **{name: getattr(problem.mask, name) for name in _OF_MASK},
        **{name: getattr(problem, name) for name in _OF_PROBLEM},
        dropout_seed=None,
        quantized=problem.quantized_from is not None,
        sinks=besides.sinks is not None,
        alibi_slopes=slopes,
        distance_bias=None if besides.distance_bias is None else besides.distance_bias.shape[1],
        transport=transport,
        blocks=compared,
        requires_grad=needs_grad,
        # Elsewhere a rank may use lse alone: its gradient travels only where heads are exchanged.
        return_lse=problem.return_lse and needs_grad and problem.exchange.fold > 1,
        version=version(),
    )
