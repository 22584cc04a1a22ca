"""The fine-tuning example keeps what a pretrained model is, goes on, and writes it again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ringray.models.huggingface as hf
from tests.support import finetune_checks as checks
from tests.support.ranks import on_ring
from tests.test_examples import ROOT, TORCHRUN, losses


@pytest.fixture(scope="module")
def example() -> checks.Any:
    hf.register()
    return checks.program()


@pytest.mark.parametrize("name", checks.MODELS)
def test_rope_keeps_its_scaling(name: str, example: checks.Any, tmp_path: Path) -> None:
    """Only the base of layers that see the whole context is another one, if asked for."""
    place = checks.pretrained(tmp_path, name)
    plain = AutoModelForCausalLM.from_pretrained(place)
    model, dtype = example.load(checks.given(place, seq_len=4096))
    assert dtype == torch.bfloat16
    want, got = checks.frequencies(plain), checks.frequencies(model)
    assert want.keys() == got.keys()
    assert all(torch.equal(got[table], want[table]) for table in want)
    assert model.config.max_position_embeddings in (64, 4096)

    theta = 3e6
    config = AutoConfig.from_pretrained(place)
    table = config.rope_parameters.get("full_attention", config.rope_parameters)
    table["rope_theta"] = theta
    want = checks.frequencies(AutoModelForCausalLM.from_config(config))
    model, _ = example.load(checks.given(place, seq_len=4096, rope_theta=theta))
    got = checks.frequencies(model)
    changed = {name for name in want if not torch.equal(got[name], checks.frequencies(plain)[name])}
    assert all(torch.equal(got[table], want[table]) for table in want)
    assert len(changed) > 0
    assert not any("sliding" in table for table in changed)


def test_a_base_without_rope_is_refused(example: checks.Any, tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="--rope-theta: gpt2 has no RoPE"):
        example.load(checks.given(tmp_path, rope_theta=1e6))


def test_the_rate_rises_and_falls(example: checks.Any) -> None:
    rates = [example.rate(checks.given(steps=40), step) for step in range(40)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11
    assert example.rate(checks.given(steps=1), 0) == 1


@pytest.mark.parametrize(("name", "dtype"), [("llama3", torch.bfloat16), ("gemma3", torch.float32)])
def test_an_export_has_the_logits_of_the_ring(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    checks.pretrained(tmp_path, name, dtype)
    on_ring(2, [partial(checks.an_export_has_the_logits, tmp_path, name)])


@pytest.mark.exhaustive
def test_a_pretrained_model_goes_on_and_is_exported(tmp_path: Path) -> None:
    """Interrupted, and on another number of ranks, as at once; in small steps."""
    place = checks.pretrained(tmp_path, "llama3")
    program = [checks.PROGRAM, "--data", ROOT / "docs", "--seq-len", 101]
    program += ["--model", place, "--steps", 6]
    at_once = [*program, "--export", tmp_path / "at-once"]
    whole = losses(tmp_path, *TORCHRUN, 2, *at_once, steps=range(6))
    saving = [*program, "--checkpoints", tmp_path / "kept", "--save-every", 3]
    losses(tmp_path, *TORCHRUN, 2, *saving, steps=range(6))
    newest = tmp_path / "kept" / "step-00000006" / ".metadata"
    newest.write_bytes(newest.read_bytes()[:-1])  # goes on from step 3
    resumed = [*TORCHRUN, 1, *saving, "--export", tmp_path / "kept-on"]
    went_on = [float(loss) for loss in losses(tmp_path, *resumed, steps=range(3, 6))]
    assert went_on == pytest.approx([float(loss) for loss in whole[3:]], abs=2e-2)

    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        for folder in ("llama3", "at-once", "kept-on")
    ]
    before, one, other = (dict(model.named_parameters()) for model in models)
    for name, weight in one.items():
        assert weight.dtype == torch.bfloat16
        assert torch.allclose(weight.float(), other[name].float(), rtol=0.02, atol=2e-4), name
        assert torch.allclose(weight.float(), before[name].float(), rtol=0.02, atol=2e-4), name
    assert any(not torch.equal(weight, before[name]) for name, weight in one.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "at-once")
    assert tokenizer("A B").input_ids == [33, 0, 34]
