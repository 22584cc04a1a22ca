"""Refusals of trainers on a ring, checked on every rank of a real one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from ringray.plugins.trainer import RingCallback
from tests.support import trainer_checks as checks


def refused(rank: int, size: int) -> None:
    """Refuses what cannot be right by a ValueError on every rank, before the first step."""
    with checks.started(rank, size):
        options = {
            "label_smoothing_factor": 0.1,
            "neftune_noise_alpha": 5.0,
            "auto_find_batch_size": True,
            "eval_use_gather_object": True,
            "train_sampling_strategy": "batch_rebalance",
            "accelerator_config": {"dispatch_batches": True},
        }
        for name, value in options.items():
            reason = "dispatch_batches" if name == "accelerator_config" else name
            with pytest.raises(ValueError, match=reason):
                checks.trainer(RingCallback(), **{name: value})
        with pytest.raises(ValueError, match="compute_loss_func"):
            checks.trainer(RingCallback(), init={"compute_loss_func": lambda *_, **__: None})
        with pytest.raises(ValueError, match="attends by 'sdpa', expected 'ringray'"):
            checks.trainer(RingCallback(), attention="sdpa")
        with pytest.raises(ValueError, match="ring_size: got 3, expected a part of 2"):
            checks.trainer(RingCallback(ring_size=3))
        # One rank alone has another option.
        with pytest.raises(ValueError, match="neftune" if rank else "rank\\(s\\) 1 were refused"):
            checks.trainer(RingCallback(), neftune_noise_alpha=5.0 if rank else None)
        disagreed = "ranks disagree about the problem: {}: .* here .rank {}".format
        other_options: dict[str, tuple[Any, Any]] = {
            "learning_rate": (1e-2, 1e-3),
            "max_grad_norm": (1.0, 2.0),
            "optim": ("sgd", "adafactor"),
            "weight_decay": (0.0, 0.1),
            "gradient_accumulation_steps": (1, 2),
            "seed": (1, 2),
            "per_device_eval_batch_size": (3, 4),
            "lr_scheduler_kwargs": ({"a": 1}, {"a": 2}),
        }
        for name, values in other_options.items():
            with pytest.raises(ValueError, match=disagreed(name, rank)):
                checks.trainer(RingCallback(), **{name: values[rank]})
        with pytest.raises(ValueError, match="there are several, expected one"):
            checks.trainer(
                None, attention="ringray", init={"callbacks": [RingCallback(), RingCallback()]}
            )
        with pytest.raises(ValueError, match=disagreed("batches", rank)):
            checks.trainer(RingCallback(), data=checks.rows(30 + 9 * rank), max_steps=2).train()
        # Each rank may write where and report what it likes.
        free = {"disable_tqdm": rank == 0, "run_name": f"rank {rank}"}
        evaluating = checks.trainer(RingCallback(), f"unused{rank}", evaluated=3 + 4 * rank, **free)
        with pytest.raises(ValueError, match="Evaluation: " + disagreed("batches", rank)):
            evaluating.evaluate()
        with pytest.raises(ValueError, match="Prediction: " + disagreed("batches", rank)):
            evaluating.predict(checks.rows(3 + 4 * rank))
        counting = checks.trainer(RingCallback(), init={"compute_metrics": len} if rank else None)
        with pytest.raises(ValueError, match=disagreed("prediction_loss_only", rank)):
            counting.evaluate()
        twice = RingCallback()
        checks.trainer(twice)
        with pytest.raises(ValueError, match="another trainer has it, expected one for each"):
            checks.trainer(twice)
        for collate, reason in (
            (partial(checks.padded, left=True), "padding on the right"),
            (partial(checks.padded, labelled=True), "labels: padding has labels"),
            (partial(differing, rank), "input_ids: .* here .rank"),
        ):
            refusing = checks.trainer(RingCallback(), collate=collate, max_steps=2)
            with pytest.raises(ValueError, match=reason):
                refusing.train()
            assert refusing.state.global_step == 0
    with pytest.raises(ValueError, match="there are 2 ranks; start by torchrun"):
        checks.trainer(RingCallback())


def differing(rank: int, batch: checks.Rows) -> dict[str, Tensor]:
    """Makes a batch that differs between ranks."""
    inputs = checks.padded(batch)
    inputs["input_ids"][0, 0] += rank
    return inputs
