"""Ring attention under ``torch.compile``: two operators, opaque to the compiler.

Under compilation ``ring_attention`` is ``ringray::attention``, and its gradient is
``ringray::attention_backward``. Their kernels do the same as an eager call: check, agree, exchange.
Their fake kernels know shapes only and refuse nothing, so mistakes are raised when the graph runs,
as a ValueError on every rank, and not by one rank that compiles while the others run.

Weaker means do not suffice: ``allow_in_graph`` and ``nonstrict_trace`` keep Dynamo out, but
AOTAutograd would still trace the messages between ranks, and ``disable`` breaks the graph.

Operators are stateless, so their arguments replace the state of an eager call: a process group is
its name, ``Blocks`` are their text, and the backward pass describes its problem again. An operator
must not return its inputs, so it returns only the other tensors that ``loops`` saves.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention import loops
from ringray.attention.arguments import Options, mistake, on_host, prepare, resolve
from ringray.attention.per_head import Besides, Learned, mistaken_slopes
from ringray.comm.ring import connect_named, name_of, place_in
from ringray.traffic import walk
from ringray.traffic.routes import back
from ringray_kernels.config import Blocks
from ringray_kernels.dropout import SEEDS, unusable_dropout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch.distributed as dist

    from ringray.attention.problem import RankProblem

_INPUTS = 5  # q, k, v, out, lse: what every pass saves first


# Options in place of those that the operator is to refuse.
_ACCEPTED = Options(
    partitions.DEFAULT, True, None, None, None, None, None, None, None, 0.0, None,
    transports.DEFAULT,
    "auto", "auto", False, None,
)  # fmt: skip

# The arguments of both operators except tensors. ``ranks``: of the ring; shapes depend on it, so it
# is part of the cache key of graphs. Then ``Options``, with the two types of its ``blocks``;
# ``window``: one number or two, -1 for None.
_SETTINGS = (
    "str? group, int ranks, str partition, bool causal, SymInt[]? window, SymInt? chunk, "
    "SymInt[]? prefix, SymInt? global_tokens, SymInt? seq_len, float? scale, float? softcap, "
    "float dropout_p, str? quantize, "
    "str transport, str backward, str backend, bool return_lse, SymInt? rows, str? blocks"
)


def _options(settings: Sequence[Any]) -> Options:
    *given, rows, blocks = settings[2:]
    if blocks is not None:
        rows = Blocks.parse(blocks) if blocks else Blocks()
    options = Options._make([*given, rows])
    window: Any = options.window
    if window is not None:
        both = len(window) == 2
        window = tuple(None if side == -1 else side for side in window) if both else window[0]
    prefix = None if options.prefix is None else tuple(options.prefix)
    return options._replace(window=window, prefix=prefix)


def _flat(options: Options) -> list[Any]:
    """Returns the inverse of ``_options``, as the operators take it."""
    blocks, window, prefix = options.blocks, options.window, options.prefix
    given: dict[str, Any] = {}
    if window is not None:
        sides = window if isinstance(window, tuple) else (window,)
        given["window"] = [-1 if side is None else side for side in sides]
    if prefix is not None:
        given["prefix"] = list(prefix)
    cut = (None, blocks.text) if isinstance(blocks, Blocks) else (blocks, None)
    return [*options._replace(**given)[:-1], *cut]


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function as ``ringray::NAME(ARGUMENTS) -> RETURNS``; ``fake`` makes empty tensors
    of its results' shapes. The function returns new, contiguous tensors."""
    name, _, arguments = schema.partition("(")

    def register(function: Callable[..., Any]) -> Any:
        registered = torch.library.custom_op(
            f"ringray::{name}", function, mutates_args=(), schema=f"({arguments}",
            # The compiler decides on each rank for itself when it captures a CUDA graph and when it
            # replays one, but ranks have to agree and send at the same calls.
            tags=(torch.Tag.cudagraph_unsafe,),
        )  # fmt: skip
        registered.register_fake(fake)
        return registered

    return register


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    besides: Besides,
    group: dist.ProcessGroup | None,
    options: Options,
    seed: int | None,
    *,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of ``ring_attention`` in a graph. Dynamo traces this function only."""
    refused = _refused(options, besides) or unusable_dropout(options.dropout_p, seed)
    cu_seqlens, sinks, slopes, table = besides
    if refused is not None:  # the operator raises it: other ranks may run theirs already
        options = _ACCEPTED
        cu_seqlens = sinks = slopes = table = None
    # Not in the operators, so that all layers and both passes share one copy.
    cu_seqlens, slopes = (x if x is None else on_host_op(x) for x in (cu_seqlens, slopes))
    seeds = None
    if options.dropout_p:  # an operator of torch's, which compilers know to be random
        given: Any = {"dtype": torch.int64, "device": "cpu"}
        seeds = torch.randint(SEEDS, (), **given) if seed is None else torch.full((), seed, **given)
    _, ranks = place_in(group)
    out, lse, *_ = _attention(
        q, k, v, cu_seqlens, sinks, slopes, table, seeds, needs_grad, refused, name_of(group),
        ranks, *_flat(options),
    )  # fmt: skip
    return out, lse


def _refused(options: Options, besides: Besides) -> str | None:
    """Returns the mistake in arguments whose types no operator takes, or None."""
    wrong = mistake(options, types_only=True)
    blocks: object = options.blocks
    given: tuple[object, ...] = besides
    cu_seqlens, sinks, slopes, table = given
    if blocks is not None and (not isinstance(blocks, int | Blocks) or isinstance(blocks, bool)):
        wrong = f"blocks: got {blocks!r}, expected None, an integer or a ringray.Blocks"
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        wrong = f"cu_seqlens: got {cu_seqlens!r}, expected integers in a tensor or a list"
    for name, x in (("sinks", sinks), ("distance_bias", table)):
        if x is not None and not isinstance(x, Tensor):
            wrong = f"{name}: got {type(x).__name__}, expected None or a tensor"
    if slopes is not None:
        wrong = mistaken_slopes(slopes) or wrong
    for name in ("partition", "transport", "backward", "backend"):
        if not isinstance(getattr(options, name), str):
            wrong = f"{name}: got {getattr(options, name)!r}, expected a name"
    return wrong


@operator(
    "on_host(Tensor x) -> Tensor", fake=lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu")
)
def on_host_op(x: Tensor) -> Tensor:
    """Returns a copy of boundaries or slopes in host memory, which synchronises once per tensor."""
    return on_host(x).clone()


def _like_inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, sinks: Tensor | None,
    alibi_slopes: Tensor | None, distance_bias: Tensor | None, seed: Tensor | None,
    needs_grad: bool, refused: str | None, *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    kept = _kept_like(q, k, v, settings) if needs_grad else []
    return out, lse, torch.empty((), dtype=torch.int64, device="cpu"), kept


def _kept_like(q: Tensor, k: Tensor, v: Tensor, settings: Sequence[Any]) -> list[Tensor]:
    """Makes empty tensors like those that a forward pass keeps, see ``_pack``."""
    try:
        options, ranks = _options(settings), settings[1]
        batch, heads, rows, width = q.shape
        value_width = v.shape[3]
        exchange = transports.plan(options.transport, ranks, int(heads), int(k.shape[1]))
        backward = walk.resolve_backward(options.backward, options.transport, walks=exchange.walks)
    except ValueError:
        return []  # the operator raises it when it runs
    fold = exchange.fold
    rows, heads, kv_heads = rows * fold, heads // fold, k.shape[1] // fold
    queries, keys = (batch, heads, rows), (batch, kv_heads, rows)
    kept: list[Tensor] = []
    if fold > 1:
        shapes = (*queries, width), (*keys, width), (*keys, value_width), (*queries, value_width)
        kept = [*map(q.new_empty, shapes), q.new_empty(queries, dtype=torch.float32)]
    if backward == "reverse" and (lanes := _lanes(exchange)):
        room = (batch, kv_heads, lanes * rows)
        kept += [q.new_empty((*room, last)) for last in (width, value_width)]
    return kept


def _lanes(exchange: transports.Exchange) -> int:
    """Returns the most chunks that a rank keeps from the forward pass to walk back from."""
    ways = [route for route in exchange.routes if back(route) is not None]
    return max((len(route.lanes) for route in ways), default=0)


def _pack(saved: tuple[Tensor, ...], problem: RankProblem) -> list[Tensor]:
    """Returns the tensors that ``loops.forward`` saved, except inputs and results of the operator.

    The number of K and V rows that a rank keeps to walk back from depends on the boundaries of
    documents, but shapes must not: the rows are copied into tensors with room for the most.
    """
    first = saved[:_INPUTS] if problem.exchange.fold > 1 else ()
    lanes = _lanes(problem.exchange) if problem.backward == "reverse" else 0
    packed = []
    for which, like in enumerate(saved[1:3] if lanes else ()):
        chunks = saved[_INPUTS + which :: 2]
        room = like.new_empty((*like.shape[:2], lanes * problem.layout.rows, like.shape[3]))
        at = 0
        for chunk in chunks:
            room[:, :, at : at + chunk.shape[2]] = chunk
            at += chunk.shape[2]
        packed.append(room)
    return [*first, *packed]


def _unpack(saved: list[Tensor], problem: RankProblem) -> tuple[Tensor, ...]:
    """Returns the tensors for ``loops.backward``: the inverse of ``_pack``, this rank's first."""
    first, room = saved[:_INPUTS], saved[_INPUTS:]
    rows = [rows.size for _, rows in problem.script("backward").kept] if room else []
    chunks = [x[:, :, : sum(rows)].split(rows, 2) for x in room if rows]
    return (*first, *(x for pair in zip(*chunks, strict=True) for x in pair))


@operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, Tensor? sinks, "
    "Tensor? alibi_slopes, Tensor? distance_bias, Tensor? seed, bool needs_grad, str? refused, "
    f"{_SETTINGS}) -> (Tensor out, Tensor lse, Tensor call, Tensor[] kept)",
    fake=_like_inputs,
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, sinks: Tensor | None,
    alibi_slopes: Tensor | None, distance_bias: Tensor | None, seed: Tensor | None,
    needs_grad: bool, refused: str | None, *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    comm, options = connect_named(*settings[:2]), _options(settings)
    besides = Besides(cu_seqlens, sinks, alibi_slopes, distance_bias)
    problem, call = resolve(
        q, k, v, besides, options, comm, needs_grad=needs_grad, refused=refused,
        seed=None if seed is None else int(seed),
    )  # fmt: skip
    learned = Learned(sinks, distance_bias)
    out, lse, saved = loops.forward(q, k, v, problem, comm, learned)
    kept = [x.contiguous() for x in _pack(saved, problem)] if needs_grad else []
    number = torch.tensor(call, dtype=torch.int64, device="cpu")
    return out.contiguous(), lse.contiguous(), number, kept


def _like_gradients(
    dout: Tensor, dlse: Tensor | None, saved: list[Tensor], call: Tensor,
    cu_seqlens: Tensor | None, sinks: Tensor | None, alibi_slopes: Tensor | None,
    distance_bias: Tensor | None, seed: Tensor | None, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    learned = (sinks, distance_bias)
    more = [dout.new_empty(0) if x is None else x.new_empty(x.shape) for x in learned]
    return (*(dout.new_empty(shape) for shape in _shapes(dout, saved)), *more)


def _shapes(dout: Tensor, saved: list[Tensor]) -> list[tuple[int, ...]]:
    """Returns the shapes of this rank's q, k and v."""
    fold = dout.shape[1] // saved[0].shape[1]  # saved are a share of the heads and rows of all
    return [(x.shape[0], x.shape[1] * fold, dout.shape[2], x.shape[3]) for x in saved[:3]]


@operator(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor[] saved, Tensor call, "
    "Tensor? cu_seqlens, Tensor? sinks, Tensor? alibi_slopes, Tensor? distance_bias, Tensor? seed, "
    f"{_SETTINGS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dtable)",
    fake=_like_gradients,
)
def _attention_backward(
    dout: Tensor, dlse: Tensor | None, saved: list[Tensor], call: Tensor,
    cu_seqlens: Tensor | None, sinks: Tensor | None, alibi_slopes: Tensor | None,
    distance_bias: Tensor | None, seed: Tensor | None, *settings: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    comm, options = connect_named(*settings[:2]), _options(settings)
    q, k, v = (dout.new_empty(1).expand(shape) for shape in _shapes(dout, saved))
    besides = Besides(cu_seqlens, sinks, alibi_slopes, distance_bias)
    problem, _ = prepare(q, k, v, besides, options, comm, needs_grad=True)
    problem = problem if seed is None else problem.seeded(int(seed))
    if dlse is not None and dlse.device.type == "cpu" and not dlse.any():
        dlse = None  # of a compiler that has no undefined gradients
    learned = Learned(sinks, distance_bias)
    kept = _unpack(saved, problem)
    gradients = loops.backward(dout, dlse, kept, problem, comm, int(call), learned)
    dq, dk, dv = (x.to(dout.dtype).contiguous() for x in gradients[:3])
    learnt = iter(gradients[3:])
    more = [dout.new_empty(0) if x is None else next(learnt).to(x.dtype) for x in learned]
    return dq, dk, dv, *more


def _setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, list[Tensor]]
) -> None:
    q, k, v, cu_seqlens, sinks, slopes, table, seed, _, _, *ctx.settings = inputs
    out, lse, call, kept = output
    saved = kept if len(kept) >= _INPUTS else [q, k, v, out, lse, *kept]
    # What is not traced saves what an eager call saves: in a checkpoint one may repeat the other.
    # The rest is of the forward pass, and so is its seed, even if a repetition draws another.
    ctx.beside = (call.clone(), cu_seqlens, slopes, seed) if type(call) is Tensor else ()
    traced = () if ctx.beside else (call, cu_seqlens, slopes, seed)
    ctx.save_for_backward(sinks, table, *traced, *saved)
    ctx.mark_non_differentiable(call, *kept)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    sinks, table, *saved = ctx.saved_tensors
    call, cu_seqlens, slopes, seed = ctx.beside or (saved.pop(0) for _ in range(4))
    if dout is None:  # only lse was used
        assert dlse is not None
        dout = saved[2].new_zeros((*dlse.shape, saved[2].shape[3]))
    *gradients, dsinks, dtable = _attention_backward(
        dout, dlse, saved, call, cu_seqlens, sinks, slopes, table, seed, *ctx.settings
    )
    dsinks = None if sinks is None else dsinks
    dtable = None if table is None else dtable
    return (*gradients, None, dsinks, None, dtable, *[None] * (3 + len(ctx.settings)))


_attention.register_autograd(_backward, setup_context=_setup)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns contexts of the forward pass and of its repetition, a ``context_fn`` of
    ``torch.utils.checkpoint.checkpoint``: out and lse of ``ring_attention`` are kept, and what
    ranks exchanged on transports that exchange heads; everything else is computed again.

    Example::

        checkpoint(layer, x, use_reentrant=False, context_fn=ringray.nn.keep_attention)
    """
    # Both contexts are dispatch modes, in which ring_attention is this operator.
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts([torch.ops.ringray.attention.default])
    return contexts
