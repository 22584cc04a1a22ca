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

Eager calls have a door of their own (``op``): through this one a call on tiny tensors takes 26%
longer, and 84% with its gradients.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ringray import transport as transports
from ringray.attention import loops
from ringray.attention.arguments import prepare, resolve
from ringray.attention.call import DEFAULTS, SETTINGS, TYPES, mistake, unnamed
from ringray.attention.deal import heard, spoken
from ringray.attention.documents import on_host
from ringray.attention.tensor_arguments import ScoreParameters, TensorArguments, mistyped
from ringray.comm.ring import RingGroup, connect_named, name_of, place_in
from ringray.traffic import walk
from ringray.traffic.routes import back
from ringray_kernels.config import Blocks
from ringray_kernels.dropout import SEEDS, unusable_dropout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ringray.attention.problem import RankProblem

_INPUTS = 5  # q, k, v, out, lse: what every pass saves first

# The types of an operator's schema for those of settings.
_SCHEMA = {
    "bool": "bool",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
    "str": "str",
    "str | None": "str?",
    "Window": "SymInt[]?",
    "Lengths": "SymInt[]?",
    "Cut": "SymInt?",  # and a text after all settings
}

_TENSORS = ", ".join(f"Tensor? {name}" for name in TensorArguments._fields)
# The rest of both operators' arguments. ``ranks``: of the ring; shapes depend on it, so it is part
# of the cache key of graphs.
_SETTINGS = "str? group, int ranks, " + ", ".join(
    [*(f"{_SCHEMA[annotation]} {name}" for name, annotation in TYPES.items()), "str? blocks_text"]
)


def _flat(settings: dict[str, Any]) -> list[Any]:
    """Returns settings as the operators take them: lists for one number or several, -1 for None
    among them, and ``Blocks`` as their text."""
    values = []
    for name in SETTINGS:
        value = settings[name]
        if value is not None and _SCHEMA[TYPES[name]] == "SymInt[]?":
            several = value if isinstance(value, tuple) else (value,)
            value = [-1 if number is None else number for number in several]
        values.append(None if isinstance(value, Blocks) else value)
    blocks = settings["blocks"]
    return [*values, blocks.text if isinstance(blocks, Blocks) else None]


def _settings(flat: Sequence[Any]) -> dict[str, Any]:
    """Returns the inverse of ``_flat``."""
    *values, text = flat
    settings = dict(zip(SETTINGS, values, strict=True))
    for name, value in settings.items():
        if value is not None and _SCHEMA[TYPES[name]] == "SymInt[]?":
            several = tuple(None if number == -1 else number for number in value)
            settings[name] = several if len(several) > 1 else several[0]
    if text is not None:
        settings["blocks"] = Blocks.parse(text) if text else Blocks()
    return settings


class _Arguments(NamedTuple):
    """The arguments that both operators have beside their tensors q, k and v, or gradients."""

    tensors: TensorArguments
    seed: Tensor | None
    group: str | None
    ranks: int
    settings: dict[str, Any]

    @classmethod
    def read(cls, flat: Sequence[Any]) -> _Arguments:
        """Reads them in the order of the schemas."""
        count = len(TensorArguments._fields)
        seed, group, ranks, *rest = flat[count:]
        tensors, settings = TensorArguments(*flat[:count]), _settings(rest)
        return cls(tensors, seed, group, ranks, settings)

    @property
    def dealt(self) -> dict[str, Any]:
        """Returns the settings with the partition that is dealt, if it is."""
        return {
            **self.settings,
            "partition": heard(self.settings["partition"], self.tensors.dealt),
        }


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function as ``ringray::NAME(ARGUMENTS) -> RETURNS``; ``fake`` makes empty tensors
    of its results' shapes. The function returns new, contiguous tensors."""
    name, _, arguments = schema.partition("(")

    def register(function: Callable[..., Any]) -> Any:
        registered = torch.library.custom_op(
            f"ringray::{name}",
            function,
            mutates_args=(),
            schema=f"({arguments}",
            # The compiler decides on each rank for itself when it captures a CUDA graph and when it
            # replays one, but ranks have to agree and send at the same calls.
            tags=(torch.Tag.cudagraph_unsafe,),
        )
        registered.register_fake(fake)
        return registered

    return register


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: TensorArguments,
    group: RingGroup,
    settings: dict[str, Any],
    seed: int | None,
    *,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of ``ring_attention`` in a graph. Dynamo traces this function only."""
    name, dealt = spoken(settings["partition"])
    settings, tensors = {**settings, "partition": name}, tensors._replace(dealt=dealt)
    refused = mistake(settings) or unnamed(settings) or mistyped(tensors)
    refused = refused or unusable_dropout(settings["dropout_p"], seed)
    if refused is not None:  # the operator raises it: other ranks may run theirs already
        settings, tensors = DEFAULTS, TensorArguments()
    # Not in the operators, so that all layers and both passes share one copy.
    cu_seqlens, slopes = (
        x if x is None else on_host_op(x) for x in (tensors.cu_seqlens, tensors.alibi_slopes)
    )
    tensors = tensors._replace(cu_seqlens=cu_seqlens, alibi_slopes=slopes)
    seeds = None
    if settings["dropout_p"]:  # an operator of torch's, which compilers know to be random
        like: Any = {"dtype": torch.int64, "device": "cpu"}
        seeds = torch.randint(SEEDS, (), **like) if seed is None else torch.full((), seed, **like)
    _, ranks = place_in(group)
    out, lse, *_ = _attention(
        q, k, v, needs_grad, refused, *tensors, seeds, name_of(group), ranks, *_flat(settings)
    )
    return out, lse


@operator(
    "on_host(Tensor x) -> Tensor", fake=lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu")
)
def on_host_op(x: Tensor) -> Tensor:
    """Returns a copy of boundaries or slopes in host memory, which synchronises once per tensor."""
    return on_host(x).clone()


def _like_results(
    q: Tensor, k: Tensor, v: Tensor, needs_grad: bool, refused: str | None, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    arguments = _Arguments.read(flat)
    packed = _kept_like(q, k, v, arguments.settings, arguments.ranks) if needs_grad else []
    return out, lse, torch.empty((), dtype=torch.int64, device="cpu"), packed


def _kept_like(
    q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any], ranks: int
) -> list[Tensor]:
    """Makes empty tensors like those that a forward pass keeps, see ``_pack``."""
    try:
        batch, heads, rows, width = q.shape
        value_width = v.shape[3]
        exchange = transports.plan(settings["transport"], ranks, int(heads), int(k.shape[1]))
        backward = walk.resolve_backward(
            settings["backward"], settings["transport"], walks=exchange.walks
        )
    except ValueError:
        return []  # the operator raises it when it runs
    fold = exchange.fold
    rows, heads, kv_heads = rows * fold, heads // fold, k.shape[1] // fold
    queries, keys = (batch, heads, rows), (batch, kv_heads, rows)
    like_kept: list[Tensor] = []
    if fold > 1:
        shapes = (*queries, width), (*keys, width), (*keys, value_width), (*queries, value_width)
        like_kept = [*map(q.new_empty, shapes), q.new_empty(queries, dtype=torch.float32)]
    if backward == "reverse" and (lanes := _lanes(exchange)):
        room = (batch, kv_heads, lanes * rows)
        like_kept += [q.new_empty((*room, last)) for last in (width, value_width)]
    return like_kept


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
        row = 0
        for chunk in chunks:
            room[:, :, row : row + chunk.shape[2]] = chunk
            row += chunk.shape[2]
        packed.append(room)
    return [*first, *packed]


def _unpack(saved: list[Tensor], problem: RankProblem) -> tuple[Tensor, ...]:
    """Returns the tensors for ``loops.backward``: the inverse of ``_pack``, this rank's first."""
    first, room = saved[:_INPUTS], saved[_INPUTS:]
    rows = [rows.size for _, rows in problem.script("backward").kept] if room else []
    chunks = [x[:, :, : sum(rows)].split(rows, 2) for x in room if rows]
    return (*first, *(x for pair in zip(*chunks, strict=True) for x in pair))


@operator(
    "attention(Tensor q, Tensor k, Tensor v, bool needs_grad, str? refused, "
    f"{_TENSORS}, Tensor? seed, {_SETTINGS}) "
    "-> (Tensor out, Tensor lse, Tensor call, Tensor[] kept)",
    fake=_like_results,
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, needs_grad: bool, refused: str | None, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    arguments = _Arguments.read(flat)
    comm, tensors = connect_named(arguments.group, arguments.ranks), arguments.tensors
    problem, number = resolve(
        q,
        k,
        v,
        tensors,
        arguments.dealt,
        comm,
        needs_grad=needs_grad,
        refused=refused,
        seed=None if arguments.seed is None else int(arguments.seed),
    )
    out, lse, saved = loops.forward(q, k, v, problem, comm, tensors.parameters)
    packed = [x.contiguous() for x in _pack(saved, problem)] if needs_grad else []
    call = torch.tensor(number, dtype=torch.int64, device="cpu")
    return out.contiguous(), lse.contiguous(), call, packed


def _like_gradients(
    dout: Tensor, dlse: Tensor | None, saved: list[Tensor], call: Tensor, *flat: Any
) -> tuple[Tensor, ...]:
    parameters = _Arguments.read(flat).tensors.parameters
    shares = [dout.new_empty(0) if x is None else x.new_empty(x.shape) for x in parameters]
    return (*(dout.new_empty(shape) for shape in _shapes(dout, saved)), *shares)


def _shapes(dout: Tensor, saved: list[Tensor]) -> list[tuple[int, ...]]:
    """Returns the shapes of this rank's q, k and v."""
    fold = dout.shape[1] // saved[0].shape[1]  # saved are a share of the heads and rows of all
    return [(x.shape[0], x.shape[1] * fold, dout.shape[2], x.shape[3]) for x in saved[:3]]


_RETURNS = ", ".join(f"Tensor d{name}" for name in ("q", "k", "v", *ScoreParameters._fields))


@operator(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor[] saved, Tensor call, "
    f"{_TENSORS}, Tensor? seed, {_SETTINGS}) -> ({_RETURNS})",
    fake=_like_gradients,
)
def _attention_backward(
    dout: Tensor, dlse: Tensor | None, saved: list[Tensor], call: Tensor, *flat: Any
) -> tuple[Tensor, ...]:
    arguments = _Arguments.read(flat)
    comm, tensors = connect_named(arguments.group, arguments.ranks), arguments.tensors
    q, k, v = (dout.new_empty(1).expand(shape) for shape in _shapes(dout, saved))
    problem, _ = prepare(q, k, v, tensors, arguments.dealt, comm, needs_grad=True)
    problem = problem if arguments.seed is None else problem.seeded(int(arguments.seed))
    if dlse is not None and dlse.device.type == "cpu" and not dlse.any():
        dlse = None  # of a compiler that has no undefined gradients
    unpacked = _unpack(saved, problem)
    gradients = loops.backward(dout, dlse, unpacked, problem, comm, int(call), tensors.parameters)
    return tuple(dout.new_empty(0) if x is None else x.contiguous() for x in gradients)


def _setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, list[Tensor]]
) -> None:
    q, k, v, _, _, *flat = inputs
    count = len(TensorArguments._fields)
    tensors, seed, ctx.settings = TensorArguments(*flat[:count]), flat[count], flat[count + 1 :]
    out, lse, call, saved_by_loop = output
    saved = saved_by_loop if len(saved_by_loop) >= _INPUTS else [q, k, v, out, lse, *saved_by_loop]
    # What is not traced saves what an eager call saves: in a checkpoint one may repeat the other.
    # The rest is of the forward pass, and so is its seed, even if a repetition draws another.
    rest = call, tensors.cu_seqlens, tensors.alibi_slopes, tensors.dealt, seed
    ctx.beside = (call.clone(), *rest[1:]) if type(call) is Tensor else ()
    ctx.save_for_backward(*tensors.parameters, *(() if ctx.beside else rest), *saved)
    ctx.mark_non_differentiable(call, *saved_by_loop)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    count = len(ScoreParameters._fields)
    every = [*ctx.saved_tensors]  # which a checkpoint lets a pass read once
    parameters, saved = ScoreParameters(*every[:count]), every[count:]
    call, cu_seqlens, slopes, dealt, seed = ctx.beside or (saved.pop(0) for _ in range(5))
    if dout is None:  # only lse was used
        assert dlse is not None
        dout = saved[2].new_zeros((*dlse.shape, saved[2].shape[3]))
    tensors = TensorArguments(
        cu_seqlens=cu_seqlens, alibi_slopes=slopes, dealt=dealt, **parameters._asdict()
    )
    dq, dk, dv, *shares = _attention_backward(
        dout, dlse, saved, call, *tensors, seed, *ctx.settings
    )
    of_parameter = {
        name: None if getattr(parameters, name) is None else share
        for name, share in zip(ScoreParameters._fields, shares, strict=True)
    }
    of_tensors = [of_parameter.get(name) for name in TensorArguments._fields]
    return dq, dk, dv, None, None, *of_tensors, None, *[None] * len(ctx.settings)


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
