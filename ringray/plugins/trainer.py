"""``RingCallback``: transformers' ``Trainer`` and TRL's ``SFTTrainer`` on rings.

To the trainer a ring is one process. Its ranks get the same batches; each computes its rows of
them, by ``shard_batch``, and what the model returns is whole again, so that loss, logging,
evaluation and predictions stay the trainer's own code.

Shape legend: B batch, S global length, R rows of one shard.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.call import whole
from ringray.attention.sharding import unshard
from ringray.comm.ring import connect, timeout_of

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_pt_utils import find_batch_size
    from transformers.trainer_utils import has_length

    from ringray.models import huggingface as hf
    from ringray.models.huggingface.ring import IGNORED, transformers_model
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ringray.plugins.trainer needs {error.name}: pip install 'ringray[hf]' accelerate trl",
        name=error.name,
    ) from error

# Accelerate's names of dimensions: ranks along the second one get the same batches.
_AXES = ("dp_replicate", "cp")
# What a collator without padding adds for kernels of others; ``position_ids`` say the same.
_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Arguments by the beginnings of their names that may differ between ranks: none computes with them.
_OWN = re.compile(
    "output_dir|run_name|project|report_to|disable_tqdm|local_rank|log_level|push_to_hub|hub_|"
    "trackio_|resume_from_checkpoint"
)


def _refuse_options(trainer: Trainer, ranks: int) -> None:
    """Raises ValueError for an option of the trainer that is wrong on a ring."""
    args = trainer.args
    callbacks = [x for x in trainer.callback_handler.callbacks if isinstance(x, RingCallback)]
    uneven = args.train_sampling_strategy == "batch_rebalance"
    wrong = {
        "callbacks": (len(callbacks) > 1, "there are several, expected one"),
        "label_smoothing_factor": (args.label_smoothing_factor, "no rank holds all logits"),
        "compute_loss_func": (trainer.compute_loss_func, "no rank holds all logits"),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "its noise would depend on the ranks"),
        "parallelism_config": (args.parallelism_config, "the callback forms the rings"),
        "deepspeed": (trainer.is_deepspeed_enabled, "take DDP or FSDP2"),
        "n_gpu": (args.n_gpu > 1, "start one process for each GPU, by torchrun"),
        "world_size": (args.world_size != ranks, f"there are {ranks} ranks; start by torchrun"),
        "auto_find_batch_size": (args.auto_find_batch_size, "ranks would try other sizes"),
        "eval_use_gather_object": (args.eval_use_gather_object, "ranks of a ring have the same"),
        "dispatch_batches": (args.accelerator_config.dispatch_batches, "each rank reads its own"),
        "train_sampling_strategy": (uneven, "ranks of a ring would get other batches"),
    }
    for name, (value, why) in wrong.items():
        if value:
            raise ValueError(f"{name}: RingCallback does not train with it: {why}")


def _refuse_padding(model: nn.Module, mask: Tensor, labels: Tensor | None) -> None:
    """Raises ValueError unless ``mask`` (B, S) hides nothing that a causal token would see."""
    real = mask.bool()
    if real.all():
        return
    if not all(getattr(module, "is_causal", True) for module in model.modules()):
        raise ValueError("attention_mask: it masks tokens, which others see without causality")
    if (real.long().diff(dim=1) > 0).any():
        raise ValueError(
            "attention_mask: it masks tokens before others, expected padding on the right "
            "(padding_side='right' of the tokenizer)"
        )
    if labels is not None and labels.shape == mask.shape and (labels[~real] != IGNORED).any():
        raise ValueError(f"labels: padding has labels, expected {IGNORED} where it is masked")


class _WholeModel:
    """The model as the trainer sees it: batches of whole sequences in, whole outputs out."""

    def __init__(self, model: nn.Module, rings: RingCallback) -> None:
        self._model, self._rings = model, rings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        """Returns the outputs for whole sequences (B, S), but for logits in training: they are the
        largest tensor of all, and loss and metrics do without."""
        rings, model, comm = self._rings, self._model, connect(self._rings.options["group"])
        count, mask = inputs.pop("num_items_in_batch", None), inputs.pop("attention_mask", None)
        for name in ("use_cache", *_DOCUMENTS):
            inputs.pop(name, None)
        tensors = {x: inputs.pop(x, None) for x in ("input_ids", "labels", "position_ids")}
        with refusing(comm):
            if mask is not None:
                _refuse_padding(model, mask, tensors["labels"])
            if inputs.get("fused_lm_head") and inputs.get("output_router_logits"):
                raise ValueError(
                    "router_aux_loss_coef: TRL balances experts by the tokens of one rank, "
                    "expected 0, or transformers' Trainer"
                )
        # Under autocast the check of the model allows its rounding.
        with rings.trainer.accelerator.autocast():
            batch = hf.shard_batch(model, **tensors, **rings.options)
        # The trainer counts the labels of all accumulated batches and replicas.
        if count is not None and "num_items_in_batch" in batch:
            batch["num_items_in_batch"] = count
        out = model(**batch, **inputs)
        forward = transformers_model(model).forward_on_ring
        outputs = {}
        for name, x in out.items():
            if name in forward.pooled:
                outputs[name] = x
            elif isinstance(x, Tensor) and x.dim() == 0:  # a loss, of which each rank has a part
                part = x * comm.world_size  # DDP and FSDP divide by it
                total = x.detach().clone()
                comm.sum(total, "loss of the trainer")
                outputs[name] = part + (total - part).detach()
            elif isinstance(x, Tensor) and (x.dim() == 2 or rings.predicting):
                outputs[name] = unshard(x, dim=1, **forward.ring.layout)
        return type(out)(**outputs)


class RingCallback(TrainerCallback):
    """Trains on rings: ``Trainer(..., callbacks=[RingCallback()])``, or ``SFTTrainer``.

    The model is made with ``attn_implementation="ringray"`` after
    ``ringray.models.huggingface.register()``. Start one process for each device by ``torchrun``;
    one process alone is a ring of one.

    Args:
        ring_size: ranks of a ring; rings are data-parallel replicas. None: a ring of all ranks.
        partition, transport, backend: as in ``ringray.ring_attention``.

    Raises:
        ValueError: on every rank, by the trainer's constructor: a model that does not attend by the
            ring, options that are wrong on it, or that differ between ranks; before a step: what
            ``shard_batch`` refuses, as ranks with other data, and padding that is not on the right.
    """

    def __init__(
        self,
        *,
        ring_size: int | None = None,
        partition: str = partitions.DEFAULT,
        transport: str = transports.DEFAULT,
        backend: str = "auto",
    ) -> None:
        self.size = ring_size
        self.options: dict[str, Any] = {
            "partition": partition,
            "transport": transport,
            "backend": backend,
            "group": None,  # of this rank's ring
        }
        self.trainer: Any = None  # whose ranks form the rings
        self.mesh: Any = None
        self.replicas: Any = None  # of the ranks with its place in their rings
        self.predicting = False  # the trainer wants logits

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Joins the trainer whose constructor runs, and changes in it what rings need."""
        comm = connect(None)
        with refusing(comm):
            if self.trainer is not None:
                raise ValueError("RingCallback: another trainer has it, expected one for each")
            trainer = _constructed()
            _refuse_options(trainer, comm.world_size)
            transformers_model(trainer.model)
            size = comm.world_size if self.size is None else self.size
            if not whole(size, 1) or comm.world_size % size:
                raise ValueError(f"ring_size: got {size!r}, expected a part of {comm.world_size}")
            agree(comm, AgreedCall("RingCallback", ring_size=size, **self.options))
            _compare(args)
        if dist.is_available() and dist.is_initialized():
            sizes = (comm.world_size // size, size)
            self.mesh = init_device_mesh(args.device.type, sizes, mesh_dim_names=_AXES)
            groups = self.replicas, self.options["group"] = self.mesh.get_all_groups()
            for group in groups:
                dist.distributed_c10d._set_pg_timeout(timeout_of(dist.group.WORLD), group)
        self.trainer, self.accelerator, self.size = trainer, trainer.accelerator, size
        self.accelerator.dataloader_config.dispatch_batches = False
        self.accelerator.gather = self._gather
        trainer.get_tp_size = lambda: size  # the trainer's word for ranks with the same batch
        _replace(self.accelerator, "prepare_data_loader", self._prepare_data_loader)
        _replace(trainer, "compute_loss", self._compute_loss)
        _replace(trainer, "prediction_step", self._prediction_step)
        _replace(trainer, "evaluation_loop", self._evaluation_loop)
        _replace(trainer, "floating_point_ops", lambda whole, inputs: whole(inputs) / size)
        if getattr(args, "predict_with_generate", False):
            _replace(trainer.model, "generate", self._generate)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Compares what decides how many calls follow: a rank that has ended answers no other."""
        with refusing(connect(None)):
            if self.trainer is None or self.trainer.accelerator is not self.accelerator:
                raise ValueError(
                    "RingCallback: it has not joined this training; expected it in the trainer's "
                    "constructor (callbacks=[RingCallback()]), without hyperparameter_search"
                )
            plan = {"batches": _length(train_dataloader), "begun": state.global_step}
            agree(connect(None), AgreedCall("training", **plan, steps=state.max_steps))

    def _evaluation_loop(
        self,
        loop: Any,
        loader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compares what decides the calls of an evaluation, and runs it by the trainer's code."""
        only = prediction_loss_only
        only = self.trainer.args.prediction_loss_only if only is None else only
        with refusing(connect(None)):
            plan = {"batches": _length(loader), "prediction_loss_only": only}
            agree(connect(None), AgreedCall(description, **plan))
        return loop(loader, description, only, *args, **kwargs)

    def _prepare_data_loader(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        """Deals batches to rings: Accelerate does by its mesh, which nothing else should see."""
        with patch.object(self.accelerator.state, "device_mesh", self.mesh):
            return prepare(*args, **kwargs)

    def _gather(self, tensors: Any) -> Any:
        """Gathers from one rank of each ring: the others have the same."""
        comm = connect(self.replicas)

        def gathered(x: Tensor) -> Tensor:
            x = x.contiguous() if x.dim() else x[None]
            parts = [torch.empty_like(x) for _ in range(comm.world_size)]
            comm.gather(parts, x, "gather of the trainer")
            return torch.cat(parts)

        return tensors if comm.world_size == 1 else tree_map_only(Tensor, gathered, tensors)

    def _compute_loss(self, loss: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss by the trainer's own code, from whole outputs."""
        if kwargs.get("num_items_in_batch") is not None:
            # Divided by ``get_tp_size``, but gathered from one rank of each ring.
            kwargs["num_items_in_batch"] = kwargs["num_items_in_batch"] * self.size
        model = model if isinstance(model, _WholeModel) else _WholeModel(model, self)
        return loss(model, inputs, *args, **kwargs)

    def _prediction_step(
        self,
        step: Any,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Evaluates by the trainer's own code, from whole outputs."""
        state = self.accelerator.gradient_state
        last = state.end_of_dataloader and state.remainder == -1  # of a stream
        # Its rows are not counted where each rank reads the stream itself; replicas fill it up.
        if last and connect(self.replicas).world_size == 1:
            state.active_dataloader.remainder = find_batch_size(inputs)
        self.predicting = not prediction_loss_only
        out = step(_WholeModel(model, self), inputs, prediction_loss_only, *args, **kwargs)
        self.predicting = False
        return out

    def _generate(
        self,
        generate: Any,
        input_ids: Tensor,
        *,
        max_length: int | None = None,
        labels: Any = None,
        **options: Any,
    ) -> Any:
        """Generates with the cache of a ring, for ``predict_with_generate``."""
        if "past_key_values" in options:  # ``hf.generate`` itself calls
            return generate(input_ids, **options)
        model = self.trainer.model
        longest = (max_length or model.generation_config.max_length or 20) - input_ids.shape[1]
        new = options.pop("max_new_tokens", None) or model.generation_config.max_new_tokens
        options |= self.options | {"max_new_tokens": new or longest}
        return hf.generate(model, input_ids, **options)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replaces a method of one object by ``function``, whose first argument is the method."""
    setattr(owner, name, partial(function, getattr(owner, name)))


def _length(loader: Any) -> int | None:
    """Returns the number of batches; None: of a stream, which ends where it ends."""
    return len(loader) if has_length(loader) else None


def _compare(args: Any) -> None:
    """Raises ValueError, on every rank, if arguments of the trainer differ between ranks."""
    values = {
        name: value
        if isinstance(value, int)
        # Objects by their type: their address is this rank's.
        else json.dumps(value, default=lambda x: type(x).__name__)
        for name, value in args.to_dict().items()
        if not _OWN.match(name)
    }
    names = [*values]
    for first in range(0, len(names), 32):  # more are more than an agreement tells apart
        some = {name: values[name] for name in names[first : first + 32]}
        agree(connect(None), AgreedCall("RingCallback", **some))


def _constructed() -> Trainer:
    """Returns the trainer whose constructor runs. It tells callbacks all but itself, so it is
    looked up among the callers."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise ValueError("RingCallback: expected a call by the constructor of a Trainer")
