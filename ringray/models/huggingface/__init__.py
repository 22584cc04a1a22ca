"""Ring attention for Hugging Face models: ``attn_implementation="ringray"``.

An unmodified model of transformers runs on this rank's shard of every sequence. ``shard_batch``
deals the tokens, adds their positions and a ``Ring``, the keyword argument that transformers passes
through the model to its attention layers (in layers recomputed by gradient checkpointing too, which
a context manager would not reach)::

    hf.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringray")
    batch = hf.shard_batch(model, input_ids, labels=labels)  # this rank's rows of it
    model(**batch).loss.backward()  # then sum losses and gradients over the ring

A model that would compute something else than in one process is refused, by the same rule on every
rank. In reading order:

sharding   ``shard_batch``: a batch, on which all ranks agree
batch      this rank's part of it, by the rules of the model
probe      ``check``: how these rules are found, by a trial of the model
mixing     its part that finds layers which mix tokens without the ring
forward    hooks that apply them to each forward
attention  a layer's attention, by the ring
masks      masks that a ring computes
generation ``generate``: new tokens, with keys and values that stay sharded
cache      the cache of its steps
ring       the ``Ring`` that travels through the model
running    the forward pass in progress
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from ringray.models.huggingface.attention import attend
from ringray.models.huggingface.generation import generate
from ringray.models.huggingface.masks import no_mask
from ringray.models.huggingface.probe import check
from ringray.models.huggingface.ring import IGNORED, NAME, Ring
from ringray.models.huggingface.sharding import shard_batch

__all__ = ["IGNORED", "NAME", "Ring", "check", "generate", "register", "shard_batch"]


def register() -> None:
    """Registers ``attn_implementation="ringray"`` with transformers; once per process is enough."""
    AttentionInterface.register(NAME, attend)
    # Without a mask function of its own, transformers would silently drop a padding mask.
    AttentionMaskInterface.register(NAME, no_mask)
