"""Trainings of models from a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringray.base.errors import SpecError
from ringray.lab.plan.plan import build
from ringray.lab.predict import hardware
from ringray.lab.report import words
from ringray.lab.specs import model as specs
from ringray.lab.trial import training
from ringray.models.sizes import table

SPEC = """
version: 1
name: it
kind: train
ring: {size: 2, device: cpu}
problem: {seq_len: 256, dtype: float32}
training: {model: %s, steps: 1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with a small model of Qwen3, below the working directory."""
    facts = {**table()["qwen3-0.6b"], "num_hidden_layers": 2, "vocab_size": 300, "head_dim": 64}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(facts))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine"


@pytest.mark.parametrize("path", ["mine/", "./mine", "mine/config.json"])
def test_a_path_is_one_of_the_working_directory(
    folder: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build(specs.parse(SPEC % path), hardware.cpu(2))
    monkeypatch.chdir("/")  # as a rank, whose working directory is another one
    model, *_ = training.from_config(plan.trials[0].config)
    assert (model.name, model.layers, model.hidden, model.head_dim) == ("mine", 2, 1024, 64)
    assert (model.heads, model.kv_heads, model.vocab, model.tied) == (16, 8, 300, True)
    assert any(line.startswith("mine: trained as a Llama") for line in words.predicted_for(plan))
    assert any("norms of Q and K" in line for line in words.predicted_for(plan))


def test_sizes_of_a_spec_change_those_of_a_file(folder: Path) -> None:
    text = (SPEC % folder).replace("steps: 1", "steps: 1, layers: 1")
    model, *_ = training.from_config(build(specs.parse(text), hardware.cpu(2)).trials[0].config)
    assert model.layers == 1


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gpt-oss-20b", "sliding_window, num_experts"),
        ("llama4-scout", "attention_chunk_size, num_experts"),
        ("deepseek-v3", "kv_lora_rank, num_experts"),
        ("granite4-h-small", "num_experts, linear attention or states"),
        ("qwen3-next-80b-a3b", "a gate of attention, num_experts, linear attention or states"),
    ],
)
def test_models_with_other_layers_are_refused(name: str, field: str) -> None:
    message = rf":7: training.model: {name} has {field}; expected layers that are all alike"
    with pytest.raises(SpecError, match=message):
        build(specs.parse(SPEC % name), hardware.cpu(2))


def test_a_wrong_path_is_a_mistake_of_the_field(folder: Path) -> None:
    with pytest.raises(SpecError, match=r":7: training.model: .*none/config.json: No such file"):
        build(specs.parse(SPEC % "none/config.json"), hardware.cpu(2))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(
        SpecError, match=r":7: training.model: .*config.json: hidden_size: got null"
    ):
        build(specs.parse(SPEC % folder), hardware.cpu(2))
    with pytest.raises(SpecError, match=r"training.model: got 'qwen3-8c'.*did you mean 'qwen3-8b'"):
        specs.parse(SPEC % "qwen3-8c")
