"""Trainers of transformers and TRL on real rings of gloo processes."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from ringray.plugins.trainer import RingCallback
from tests.support import trainer_checks as checks
from tests.support import trainer_refusals
from tests.support.ranks import on_ring


def test_losses_of_the_trainer_are_those_of_one_process() -> None:
    on_ring(2, (partial(checks.like_one_process, 50),))


def test_losses_of_trl_are_those_of_one_process() -> None:
    on_ring(2, (partial(checks.tuned_like_one_process, 50),))


def test_checkpoints_metrics_and_generation() -> None:
    on_ring(2, (checks.averaged_by_rank, checks.resumed, checks.predictions, checks.classified))


def test_what_is_refused() -> None:
    on_ring(2, (trainer_refusals.refused, checks.short))


def test_streams() -> None:
    on_ring(2, (checks.streamed,))


def test_rings_are_replicas() -> None:
    on_ring(4, (checks.replicas,))


def test_one_process_is_a_ring_of_one() -> None:
    training = checks.trainer(RingCallback(), max_steps=2)
    training.train()
    alone = checks.trainer(None, max_steps=2)
    alone.train()
    checks.compare(checks.history(training), checks.history(alone))


def test_a_callback_that_comes_late_is_refused() -> None:
    training = checks.trainer(None, attention="ringray", max_steps=2)
    training.add_callback(RingCallback())
    with pytest.raises(ValueError, match="has not joined this training"):
        training.train()


def test_a_missing_package_is_named_with_the_command() -> None:
    code = "import sys; sys.modules['transformers'] = None; import ringray.plugins.trainer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs transformers: pip install 'ringray[hf]' accelerate trl" in done.stderr
