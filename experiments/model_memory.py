"""Counts the memory of training models of Hugging Face, beside what ``ringray advise`` predicts.

    python experiments/model_memory.py [--context 8k] [MODEL ...]

Each model is made by transformers on the meta device, in its full size and without weights, with
checkpointed layers. Every tensor of one forward and backward pass, and when it goes, is counted:
what the layers keep, and the most beside it. Attention is a stand-in that keeps and makes what a
blockwise kernel does. Gradients exist already, as in all but the first micro-batch; a parameter
takes 16 bytes with weight, gradient and optimizer.
"""

from __future__ import annotations

import argparse
import logging
import warnings
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ringray.lab.predict import hardware, layers, rank_memory
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.predict.rank_memory import RankMemory
from ringray.models.sizes import named, table
from ringray.training.recipe import Degrees

MODELS = (
    "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "gemma3-12b", "gpt-oss-20b", "mixtral-8x7b",
    "glm-4.5-air", "deepseek-v3", "phi-4", "olmo3-32b",
)  # fmt: skip
CONTEXTS = (8192, 65536)  # tokens
STATE_BYTES = rank_memory.STATE_BYTES
LOSS_ROWS = 2048


class Live(TorchDispatchMode):
    """Bytes of the tensors that are made and have not gone. ``peak``: the most at once."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: dict[int, Any] = {x.untyped_storage()._cdata: x for x in known}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return made

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return

        def gone(_: Any) -> None:
            self.now -= size
            del self.storages[key]

        self.now += size
        self.peak = max(self.peak, self.now)
        self.storages[key] = weakref.ref(storage, gone)


class Blockwise(torch.autograd.Function):
    """The tensors of attention with blockwise scores, without its values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def attend(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    """Stands in for transformers' attention functions."""
    return Blockwise.apply(q, k, v).transpose(1, 2).contiguous(), None


def count(name: str, context: int) -> RankMemory:
    """Returns the counted memory of a model of ``configs.yaml`` on one rank."""
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("stand_in", attend)
    facts = {key: value for key, value in table()[name].items() if key not in ("from", "source")}
    made = transformers.CONFIG_MAPPING[facts.pop("model_type")]
    with torch.device("meta"):
        config = made(**facts, attn_implementation="stand_in")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.train().gradient_checkpointing_enable()
    weights = [*model.parameters()]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    state = [*weights, *(weight.grad for weight in weights), *model.buffers()]
    ids = torch.zeros(1, context, dtype=torch.long, device="meta")
    with Live(state) as live:
        stream = model.model(input_ids=ids, use_cache=False).last_hidden_state
        held = live.now
        losses = [
            checkpoint(_loss, rows, model.lm_head.weight, labels, use_reentrant=False)
            for rows, labels in zip(
                stream.split(LOSS_ROWS, 1), ids.split(LOSS_ROWS, 1), strict=True
            )
        ]
        torch.stack(losses).sum().backward()
    states = STATE_BYTES * sum(weight.numel() for weight in weights)
    return RankMemory(states, 0, held, live.peak - held)


def _loss(rows: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((rows @ head.T).float()[0], labels[0])


def predicted(name: str, context: int) -> RankMemory:
    """Returns the predicted memory of the same training."""
    model, alone = named(name, {}), Degrees()
    request = TrainingRequest(model, hardware.gpus("h100"), context, 1, "bfloat16", {})
    rings = layers.rings(model, request.attention(alone), 1)
    attention = max(request.cost(alone, ring).peak_memory_bytes for _, ring in rings)
    how = request.training({"kept": "input", "mlp_rows": None, "loss_rows": LOSS_ROWS})
    return rank_memory.memory(model, alone, how, attention)


def main() -> None:
    """Prints counted and predicted bytes of each model and context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--context", type=int, nargs="*", default=CONTEXTS)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    heads = f"{'states':>9} {'kept':>9} {'working':>9}"
    print(f"{'GiB':15} {'tokens':>7} {heads} {heads}  predicted / counted - 1")
    for name in asked.models:
        for context in asked.context:
            there, ours = count(name, context), predicted(name, context)
            counted, expected = (
                " ".join(f"{part / 2**30:9.2f}" for part in (it.states, it.kept, it.working))
                for it in (there, ours)
            )
            error = ours.total / there.total - 1
            print(f"{name:15} {context:7,} {counted} {expected}  {error:+.1%}", flush=True)


if __name__ == "__main__":
    main()
