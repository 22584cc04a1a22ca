"""The arguments of one call: checked, resolved to a ``RankProblem``, agreed on by all ranks.

After the first call with the same settings and tensors of the same kind one lookup finds all that
follows from them. The least recently used problems are forgotten beyond a bound.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.call import Call, InputSizes, Score, Slopes, mistake
from ringray.attention.documents import document_boundaries
from ringray.attention.open_choices import filled
from ringray.attention.problem import RankProblem
from ringray.attention.tensor_arguments import (
    BIASES,
    TensorArguments,
    check_values,
    head_slopes,
    share,
)
from ringray.base.provenance import version
from ringray.comm.ring import Comm
from ringray.traffic import deal, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Documents, Mask, argument_of
from ringray.tuning.lookup import Strategy
from ringray_kernels.api import check_blocks, resolve_backend
from ringray_kernels.checks import check_qkv
from ringray_kernels.config import Blocks
from ringray_kernels.dropout import POSITIONS, SEEDS, unusable_dropout
from ringray_kernels.intervals import capturing

Settings = Mapping[str, Any]  # see ``call``

MOST_PROBLEMS = 256
MOST_POSITIONS = 1 << 24  # of all problems: each takes up to 16 bytes for intervals and inverses
_prepared: dict[Any, tuple[RankProblem, AgreedCall]] = {}  # the least recently used first


def resolve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: TensorArguments,
    settings: Settings,
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
        problem, agreed = prepare(q, k, v, tensors, settings, comm, needs_grad=needs_grad)
        dropout_p = problem.call.score.dropout_p
        if wrong := unusable_dropout(dropout_p, seed):
            raise ValueError(wrong)
        staged = problem.exchange.staged
        if (dropout_p or staged) and capturing(q.device):
            if staged:
                raise ValueError("transport 'staged' copies by the host, so no CUDA graph takes it")
            raise RuntimeError(
                "ring_attention: got dropout while a CUDA graph is captured, expected none: each "
                "replay would drop the same weights"
            )
        comm.check(q.device, staged=staged)
    if dropout_p:
        if seed is None:
            seed = int(torch.randint(SEEDS, (), dtype=torch.int64, device="cpu"))
        problem, agreed = problem.seeded(seed), agreed.but(dropout_seed=seed)
    number = agree(comm, agreed)
    comm.open(q.device)
    return problem, number


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: TensorArguments,
    settings: Settings,
    comm: Comm,
    *,
    needs_grad: bool,
) -> tuple[RankProblem, AgreedCall]:
    """Returns what follows from the arguments, looked up if a call before had equal ones."""
    dense = isinstance(q, Tensor) and not q.is_nested and q.dim()
    documents = document_boundaries(tensors.cu_seqlens, len(q) if dense else 1)
    slopes = head_slopes(tensors.alibi_slopes)
    check_values(tensors)
    key: tuple[object, ...] | None = None
    prepared: tuple[RankProblem, AgreedCall] | None = None
    try:
        parameters = [x for x in tensors.parameters if x is not None]
        kinds = [(type(x), x.shape, x.dtype, x.device, x.layout) for x in (q, k, v, *parameters)]
        values = tuple(settings.values())
        key = (
            *kinds,
            documents,
            slopes,
            comm.rank,
            comm.world_size,
            needs_grad,
            torch.get_num_threads(),
            values,
            *map(type, values),  # True is no 1
        )
        prepared = _prepared.pop(key, None)
    except (AttributeError, RuntimeError, TypeError):
        pass  # of arguments that are refused below
    if prepared is None:
        check_qkv(q, k, v)
        sizes = InputSizes.of(q, k, v)
        if wrong := mistake(settings):
            raise ValueError(wrong)
        tensors.check(sizes, slopes, settings, comm.world_size)
        call = _read(sizes, tensors, documents, slopes, settings, comm)
        if call.score.quantize is not None and needs_grad:
            raise ValueError(
                f"quantize: got {call.score.quantize!r} where gradients are needed, expected None, "
                "or a call under torch.no_grad(): backward passes have 16 or 32 bits"
            )
        call = filled(call, sizes, comm, needs_grad=needs_grad)
        problem = _describe(sizes, call, settings["seq_len"], comm)
        prepared = problem, _agreed(problem, sizes, needs_grad)
        _forget()
    _prepared[key] = prepared
    return prepared


def _forget() -> None:
    """Forgets the least recently used problems beyond the bounds, but not the two newest."""
    while len(_prepared) > 2:
        problems = [problem for problem, _ in _prepared.values()]
        positions = sum(x.layout.padded * len(x.call.mask.rows) for x in problems)
        if len(_prepared) <= MOST_PROBLEMS and positions <= MOST_POSITIONS:
            break
        del _prepared[next(iter(_prepared))]


def _read(
    sizes: InputSizes,
    tensors: TensorArguments,
    documents: Documents,
    slopes: Slopes | None,
    settings: Settings,
    comm: Comm,
) -> Call:
    """Returns the call as its caller wrote it, with choices that are still open."""

    def of(record: type) -> dict[str, Any]:
        names = [item.name for item in fields(record)]
        return {name: settings[name] for name in names if name in settings}

    length = settings["seq_len"]
    if length is None:
        dealt = partitions.dealt_length(settings["partition"])
        length = dealt or sizes.rows * comm.world_size
    score = Score(**of(Score), **tensors.described(slopes))
    numbers: dict[str, Any] = {
        name: None if getattr(score, name) is None else float(getattr(score, name))
        for name in ("scale", "softcap", "dropout_p")
    }
    if score.scale is None:
        numbers["scale"] = sizes.head_dim**-0.5
    mask = Mask(**{**of(Mask), "seq_len": length, "documents": documents})
    return Call(mask, replace(score, **numbers), Strategy(**of(Strategy)), settings["return_lse"])


def _describe(sizes: InputSizes, call: Call, seq_len: int | None, comm: Comm) -> RankProblem:
    """Returns the problem of this rank. ``seq_len``: as given.

    Raises:
        ValueError: what was given and what is expected.
    """
    batch, heads, kv_heads, rows, head_dim, value_dim, dtype, _ = sizes
    ranks, score, strategy = comm.world_size, call.score, call.strategy
    if score.dropout_p and (size := rows * ranks) > POSITIONS:
        raise ValueError(f"dropout_p: got {size} positions, expected at most {POSITIONS}")
    partitions.true_length(strategy.partition, seq_len, rows, ranks)  # checks it
    partition = deal.resolved(strategy.partition, call.mask, ranks)
    backend = resolve_backend(strategy.backend, sizes, score.features(value_dim))
    check_blocks(strategy.blocks, backend)
    exchange = transports.plan(strategy.transport, ranks, heads, kv_heads)
    backward = walk.resolve_backward(strategy.backward, strategy.transport, walks=exchange.walks)
    fold = exchange.fold
    of_rank = heads // fold, kv_heads // fold, head_dim, value_dim
    quantized = score.quantize is not None
    place = comm.rank % fold
    problem = RankProblem(
        call=replace(call, strategy=replace(strategy, backend=backend, backward=backward)),
        layout=Layout(partition, rows * ranks, ranks // fold, fold),
        rank=comm.rank // fold,
        exchange=exchange,
        costs=walk.costs(dtype.itemsize, batch, *of_rank, quantized=quantized),
        slopes=share(score.bias_by("alibi_slopes"), fold, place),
        first_head=place * (heads // fold),
        quantized_from=dtype if quantized else None,
    )
    _ = problem.walks  # raises where the backward walk is impossible
    return problem


def _agreed(problem: RankProblem, sizes: InputSizes, needs_grad: bool) -> AgreedCall:
    """Returns what all ranks must have in common: sizes, and the fields of the call's records."""
    call, blocks = problem.call, problem.call.strategy.blocks
    of_mask = {argument_of(x.name): getattr(call.mask, x.name) for x in fields(Mask)}
    of_score = {x.name: getattr(call.score, x.name) for x in fields(Score)}
    of_strategy = {x.name: getattr(call.strategy, x.name) for x in fields(Strategy)}
    # Blocks that configure nothing are the default.
    of_strategy["blocks"] = (str(blocks) or None) if isinstance(blocks, Blocks) else blocks
    del of_strategy["source"]
    del of_score["bias"]
    of_score |= {name: call.score.bias_by(name) for name in BIASES}
    of_score["quantized"] = of_score.pop("quantize") is not None  # whose value a message can name
    return AgreedCall(
        "ring_attention",
        batch=sizes.batch,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        rows_per_rank=sizes.rows,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        dtype=sizes.dtype,
        **of_mask,
        **of_score,
        dropout_seed=None,
        **of_strategy,
        requires_grad=needs_grad,
        # Elsewhere a rank may use lse alone: its gradient travels only where heads are exchanged.
        return_lse=call.return_lse and needs_grad and problem.exchange.fold > 1,
        version=version(),
    )
