"""A trial of a model that finds layers which mix tokens without the ring.

One row is not a number, and attention by the ring lets each attend to itself only. No other row may
become one: zero times NaN is NaN, so that even weights that are still 0 pass it on.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ringray.comm.ring import RingGroup, members, name_of

_ROWS = 22  # of a trial: even, as partitions want them, and rarely another size


def refuse_unrouted(
    model: nn.Module,
    group: RingGroup,
    inputs: tuple[Any, ...] | None = None,
    *,
    sharded: bool = True,
) -> None:
    """Raises ValueError if tokens of ``model`` meet elsewhere than in ``ring_attention`` on the
    ring of ``group``, or if that cannot be tried.

    ``inputs``: of a forward, by position; None: token ids, or else rows as wide as some parameter.
    ``sharded``: False where a rank holds all tokens, which may meet anywhere but on another ring.
    """
    ring = members(name_of(group))
    if sharded:
        refuse_batch_norm(model)
    error: Exception = ValueError("its result does not depend on the tokens")
    for args, options in _guesses(model, len(ring)) if inputs is None else [(inputs, {})]:
        try:
            first = next(x for x in tree_leaves((args, options)) if isinstance(x, Tensor))
            alone = _Alone(first)
            with trying(model), alone, looking(model, alone.row, alone.length) as mixing:
                args, options = tree_map(alone.mark, (args, options))
                out = [*tensors(model(*args, **options))]
            marked = [x for x in out if x.isnan().any()]
        except Exception as failed:
            error = failed
            continue
        if others := [x for x in alone.rings if x != ring]:
            raise ValueError(
                f"group: got a layer on the ring of ranks {others[0]}, expected that of the mesh, "
                f"{ring}: group=mesh.ring"
            )
        if not sharded:
            return
        if any(x.dim() and alone.length not in x.shape for x in marked):
            mixing.append("its result")
        if mixing or not alone.partitions:
            where = f"in {mixing[0]} tokens reach others without" if mixing else "no layer calls"
            raise ValueError(
                f"model: {where} the ring, so that they see this rank's rows only; expected "
                "attention by ringray.ContextParallelAttention or ring_attention. For code that "
                "calls scaled_dot_product_attention, ringray.context_parallel(group=mesh.ring) "
                "around each step and fully_shard(model, mesh=mesh.shards) replace parallelize"
            )
        if len(alone.partitions) > 1:
            raise ValueError(
                f"partition: got {sorted(alone.partitions)}, expected one of all layers"
            )
        if marked:
            by_row = [x for x in marked if alone.length in x.shape]
            if inputs is None and not all(map(alone.rows_are_alike, by_row)):
                warnings.warn(
                    "parallelize: rows of one token and one position have different results, so "
                    f"{type(model).__name__} numbers the rows of each rank from 0, unless it asks "
                    "ringray.local_positions: positions must be an argument of its forward",
                    stacklevel=3,
                )
            return
    if not sharded:  # and a model may be one whose arguments cannot be guessed
        return
    raise ValueError(
        f"model: a trial of {type(model).__name__} fails with {type(error).__name__}: "
        f"{str(error)[:200]}; expected weights that are not on the meta device, and inputs=(...): "
        "arguments of its forward for a few rows, (B, S) token ids or (B, S, H) first"
    ) from error


def _guesses(model: nn.Module, ranks: int) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """Generates arguments of a forward. What else it requires are positions, or the length."""
    weights = [*map(Tensor.detach, model.parameters())]
    weights = weights or [torch.empty(0, dtype=torch.float32, device="cpu")]
    positions = torch.zeros(1, _ROWS, dtype=torch.int64, device=weights[0].device)
    parameters = inspect.signature(model.forward).parameters.values()
    single = [x for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    required = [x.name for x in single if x.default is x.empty]
    named = bool(single) and all(x.kind is x.KEYWORD_ONLY for x in parameters)
    others = {name: _ROWS * ranks if name == "seq_len" else positions for name in required[1:]}
    widths = dict.fromkeys(x.shape[-1] for x in weights if x.dim())
    rows = [weights[0].new_zeros(1, _ROWS, width) for width in widths]
    embeds = any(isinstance(part, nn.Embedding) for part in model.modules())
    # The likely one last, whose error is told.
    for first in (*rows, torch.ones_like(positions))[:: 1 if embeds else -1]:
        yield ((), {single[0].name: first, **others}) if named else ((first,), others)


class _Alone(TorchDispatchMode):
    """A mode in which rows attend to themselves by the ring, and the middle one is not a number:
    of arguments, or of what is made of ``first`` if it holds integers. ``partitions`` and
    ``rings`` (lists of global ranks): with which layers call the ring."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, first: Tensor) -> None:
        super().__init__()
        self.first = first
        self.partitions: set[str] = set()
        self.rings: list[list[int]] = []
        self.length, self.row = first.shape[1], first.shape[1] // 2

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.ringray.attention.default:
            named = dict(zip((x.name for x in func._schema.arguments), args, strict=False))
            self.rings.append(members(named["group"]))
            self.partitions.add(named["partition"])
            q, v = named["q"], named["v"]
            lse = q.new_zeros(q.shape[:-1], dtype=torch.float32)
            out = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
            return out, lse, torch.zeros((), dtype=torch.int64, device="cpu"), []
        out = func(*args, **(kwargs or {}))
        takes_ids = any(x is self.first for x in tree_leaves(args))
        return self.mark(out) if takes_ids or func is torch.ops.aten.embedding.default else out

    def rows_are_alike(self, x: Tensor) -> bool:
        """Tells whether all rows of a result are the same, except for the marked one."""
        rows = x.movedim(x.shape.index(self.length), 0).double()
        least = 1e-2 * (1 + rows[0].abs().max())
        return bool((rows - rows[0]).abs().nan_to_num().max() < least)

    def mark(self, x: Any) -> Any:
        """Returns ``x``, of which the middle row is not a number if it holds as many numbers."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or self.length not in x.shape:
            return x
        x = x.clone()
        x.select(x.shape.index(self.length), self.row).fill_(float("nan"))
        return x


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Runs the block in evaluation mode, eagerly, without gradients; leaves the model as it was."""
    training = [(module, module.training) for module in model.modules()]
    buffers = [(x, x.clone()) for x in model.buffers()]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, was in training:
            module.training = was
        for x, before in buffers:
            x.copy_(before)


@contextmanager
def looking(model: nn.Module, row: int, length: int) -> Iterator[list[str]]:
    """Lists the modules that run in the block and in which ``row`` makes others of ``length`` rows
    not a number."""
    names: list[str] = []

    def spreads(values: Any) -> bool:
        for x in tensors(values):
            if length in x.shape:
                rows = x.isnan().movedim(x.shape.index(length), 0).reshape(length, -1).any(1)
                if {*rows.nonzero().flatten().tolist()} - {row}:
                    return True
        return False

    def look(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if spreads(out) and not spreads((args, kwargs)):
            names.append(f"{name or 'its forward'} ({type(module).__name__})")

    hooks = [
        module.register_forward_hook(partial(look, name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def tensors(values: Any) -> Iterator[Tensor]:
    """Generates the floating-point tensors among a module's arguments or results."""
    if isinstance(values, Tensor) and values.is_floating_point():
        yield values
    values = vars(values) if is_dataclass(values) else values
    parts = values.values() if isinstance(values, Mapping) else values
    for part in parts if isinstance(values, Mapping | list | tuple) else ():
        yield from tensors(part)


def refuse_batch_norm(model: nn.Module) -> None:
    """Raises ValueError for a layer that mixes tokens in training only."""
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        raise ValueError(
            "model: it normalises over the tokens of a batch (BatchNorm), of which a "
            "rank holds a part; expected layers that act on each token"
        )
