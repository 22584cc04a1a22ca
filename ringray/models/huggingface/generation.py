"""``generate``: transformers' own generation, with keys and values that stay sharded over a ring.

The prompt but its last token is prefilled on shards, as ``shard_batch`` deals it. Then every rank
runs transformers' ``generate()`` on the whole prompt with a ``RingCache``, from which it takes what
is computed already: each step runs on the newest token on all ranks, whose attention layers meet
the sharded context by ``ring_decode``.

Shape legend: B batch, S tokens of the prompt.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.comm.ring import RingGroup, connect
from ringray.models.huggingface.batch import deal
from ringray.models.huggingface.cache import RingCache
from ringray.models.huggingface.forward import Forward
from ringray.models.huggingface.mixing import draw_tokens
from ringray.models.huggingface.probe import Probe, eager, probing
from ringray.models.huggingface.ring import Ring, digest, said, transformers_model
from ringray.models.huggingface.sharding import shard_batch
from ringray.partition import Partitioning

_TRIAL = (2, 1)  # tokens of the steps in which a model is tried


def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    group: RingGroup = None,
    partition: Partitioning = partitions.DEFAULT,
    transport: str = transports.DEFAULT,
    backend: str = "auto",
    **options: Any,
) -> Any:
    """Returns what ``model.generate(input_ids, ...)`` returns, the same on every rank. All ranks
    call it together.

    Args:
        model: the transformers model, with ``attn_implementation="ringray"``, in evaluation mode.
            At the first call it runs on a few tokens, to be checked: steps with the cache have to
            give the logits of one process.
        input_ids: (B, S) integers without padding, S at least 2, the same on every rank.
        max_new_tokens: most tokens to generate; the cache has room for them.
        group, partition, transport, backend: as in ``ringray.ring_attention``, for the prefill, of
            S - 1 tokens.
        options: of transformers' ``generate()``. Sampling needs the same seed on every rank.

    Raises:
        ValueError: on every rank, what ``shard_batch`` refuses, a model whose steps compute
            something else, padding, beams and other methods that reorder the cache, or ranks that
            have drawn different tokens.
    """
    comm = connect(group)
    with refusing(comm):
        if input_ids.dim() != 2 or input_ids.shape[1] < 2:
            raise ValueError(f"input_ids: got {said(input_ids)}, expected (B, S) with S >= 2")
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: got {max_new_tokens!r}, expected at least 1")
        inner = transformers_model(model)
        prefill: dict[str, Any] = {"partition": partition, "transport": transport}
        prefill |= {"group": group, "backend": backend}
        batch = shard_batch(model, input_ids[:, :-1], **prefill)
        _check_steps(inner, batch["ring"])
        cache = RingCache(batch["ring"], len(input_ids), input_ids.shape[1] + max_new_tokens)
        if "logits_to_keep" in inspect.signature(inner.forward).parameters:
            batch["logits_to_keep"] = 1
        with torch.no_grad():
            inner(**batch, past_key_values=cache)
        # A config for training may say that no cache is used.
        options |= {"max_new_tokens": max_new_tokens, "use_cache": True}
        generated = inner.generate(input_ids, past_key_values=cache, **options)
        # A rank that ends early, by options of its own, leaves no other in a step.
        ids = generated if isinstance(generated, Tensor) else generated.sequences
        agree(comm, AgreedCall("the end of generate", tokens=digest(ids)))
    return generated


def _check_steps(model: nn.Module, ring: Ring) -> None:
    """Checks, once for what ``check`` has found, that steps compute what one process computes."""
    forward: Forward = model.forward_on_ring  # type: ignore[assignment]
    if forward.key == forward.key_of_steps:
        return
    with probing(model, forward):
        try:
            _try_steps(model, forward, Probe(model, forward, ring, ring.seq_len - 1))
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"model: {type(model).__name__} does not step with the cache of a ring: "
                f"{type(error).__name__}: {str(error)[-200:]}"
            ) from error
    forward.key_of_steps = forward.key


def _try_steps(model: nn.Module, forward: Forward, probe: Probe) -> None:
    begin = probe.ring.seq_len
    ids = draw_tokens(forward.model, begin + sum(_TRIAL))
    with eager(model):
        want = model(input_ids=ids, use_cache=False)["logits"]
    cache = RingCache(probe.ring, 1, ids.shape[1])
    model(**deal(forward, probe.ring, ids[:, :begin], None, None), past_key_values=cache)
    for count in _TRIAL:
        new = slice(begin, begin + count)
        got = model(input_ids=ids[:, new], past_key_values=cache)["logits"]
        probe.compare_step(got, want[:, new])
        begin += count
