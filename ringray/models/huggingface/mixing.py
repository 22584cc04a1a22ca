"""A trial that finds layers which mix tokens without the ring, and the token that a head pools.

Every attention layer lets each token attend to itself only, and the embedding of one token is not a
number. No other token may become one: zero times NaN is NaN, so that even weights that are still 0
pass it on.

Shape legend: B batch, L tokens of the trial.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ringray.models.huggingface.forward import Forward
from ringray.models.huggingface.ring import Ring, padding_token
from ringray.models.huggingface.running import Running
from ringray.models.trial import looking, tensors

_LENGTH = 1021  # tokens at most


def refuse_mixing(model: nn.Module, forward: Forward, ring: Ring, longest: int) -> None:
    """Raises ValueError if tokens of ``model`` meet elsewhere than in attention layers; finds the
    calls of the ring, the outputs that are pooled and the token from which they are.

    ``longest``: length of the batch (tokens); ``ring``: passed on to the layers.
    """
    inner, pad = forward.model, padding_token(forward.model)
    ids = draw_tokens(inner, unlike_sizes(inner, min(longest, _LENGTH)))
    length = ids.shape[1]
    if pad is not None:  # no mask may depend on it, and a head pools the token before
        ids[:, -1] = pad
    places = {"middle": length // 2, "first": 0, "last": length - (1 if pad is None else 2)}
    forward.expected, forward.pooled, forward.calls = None, (), 0
    out, mixing = _marked(model, forward, ring, ids, places["middle"])
    if mixing or not forward.calls:
        where = f"in {mixing} tokens reach others without" if mixing else "no layer calls"
        raise ValueError(
            f"model: {where} the ring, so that they see this rank's rows only; expected tokens "
            "that meet in attention layers alone, all by attn_implementation: no state-space, "
            "linear-attention or convolution layers, no attention of a model's own"
        )
    forward.expected = forward.calls
    outputs = [] if out is None else float_outputs(out)
    pooled = {name for name, x in outputs if x.shape[:2] != ids.shape}
    if not pooled:
        return
    reached = {}
    for place, position in places.items():
        out, _ = _marked(model, forward, ring, ids, position)
        reached[place] = {name for name, x in float_outputs(out) if x.isnan().any()} & pooled
    reached_from = [place for place, names in reached.items() if names]
    if reached_from not in (["first"], ["last"]) or reached[reached_from[0]] != pooled:
        raise ValueError(
            f"model: {', '.join(sorted(pooled))} of {type(inner).__name__} do not come from one "
            "token, expected a head that acts on each token, on the first or on the last one that "
            "is not pad_token_id"
        )
    forward.pool, forward.pooled = reached_from[0], tuple(sorted(pooled))


def _marked(
    model: nn.Module, forward: Forward, ring: Ring, ids: Tensor, marked: int
) -> tuple[Any, str | None]:
    """Returns the outputs of the transformers model, None if a wrapper calls only parts of it,
    where one token is not a number and each attends to itself, and the first module of ``model`` in
    which others are not numbers either."""
    length, own = ids.shape[1], forward.model.get_input_embeddings()
    outputs: list[Any] = []

    def mark(module: nn.Module, args: Any, out: Any) -> None:
        if module is own or (args and torch.equal(args[0].to(ids.device), ids)):
            for x in [*tensors(out)][:1]:
                x.select(x.shape.index(length), marked).fill_(float("nan"))

    # The same tokens may go to a second model, which attends otherwise.
    embeddings = {own, *(part for part in model.modules() if isinstance(part, nn.Embedding))}
    hooks = [part.register_forward_hook(mark) for part in embeddings]
    hooks.append(forward.model.register_forward_hook(lambda *call: outputs.append(call[-1])))
    forward.alone, Running.forward = True, forward
    try:
        positions = torch.arange(length, dtype=torch.int64, device=ids.device)[None]
        with looking(model, marked, length) as mixing:
            result = model(input_ids=ids, position_ids=positions, use_cache=False, ring=ring)
    finally:
        forward.alone, Running.forward = False, None
        for hook in hooks:
            hook.remove()
    of_wrapper = [] if outputs and result is outputs[-1] else tensors(result)  # which may pool
    if any(x.dim() and length not in x.shape and x.isnan().any() for x in of_wrapper):
        mixing.append("its result")
    return outputs[-1] if outputs else None, next(iter(mixing), None)


def draw_tokens(model: PreTrainedModel, length: int) -> Tensor:
    """Draws tokens (1, length), the same on every rank, none of them special."""
    special = {
        x
        for config in (model.config, model.config.get_text_config())
        for name, value in config.to_dict().items()
        if name.endswith(("_token_id", "_token_index"))
        for x in (value if isinstance(value, list) else [value])
    }
    count = min(model.get_input_embeddings().num_embeddings, 4096)
    like: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
    plain = torch.tensor([i for i in range(count) if i not in special], **like)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(plain), (1, length), generator=generator, **like)
    return plain[drawn].to(next(model.parameters()).device)


def unlike_sizes(model: nn.Module, length: int) -> int:
    """Returns a length of at most ``length`` that no parameter has."""
    taken = {size for x in model.parameters() for size in x.shape}
    return next((n for n in range(length, length // 2, -1) if n not in taken), length)


def float_outputs(out: Any) -> list[tuple[str, Tensor]]:
    """Lists the outputs per token or per sequence."""
    if not isinstance(out, ModelOutput):
        raise ValueError(f"return_dict: got {type(out).__name__}, expected a ModelOutput")
    tensors_by_name = ((name, x) for name, x in out.items() if isinstance(x, Tensor))
    return [(name, x) for name, x in tensors_by_name if x.is_floating_point() and x.dim() >= 2]
