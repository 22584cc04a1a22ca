"""Predicted memory of models of Hugging Face beside a count of their tensors."""

from __future__ import annotations

import pytest

from experiments import model_memory

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["gpt-oss-20b", "phi-4"])
def test_predicted_memory_is_the_counted_one(name: str) -> None:
    there, ours = model_memory.count(name, 8192), model_memory.predicted(name, 8192)
    assert ours.total == pytest.approx(there.total, rel=0.05)
    assert ours.states == pytest.approx(there.states, rel=0.001)
    # Beside the inputs of layers the count has the last norm's tensors.
    assert ours.kept < there.kept < 1.25 * ours.kept
