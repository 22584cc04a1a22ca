"""The contract of adapters: each runs a model that is right, is seen where it is not, and says what
it does not do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from ringray import verification
from ringray.partition import NAMES
from ringray.transport import TRANSPORTS
from ringray.verification import TargetError, Verdict, defaults
from ringray.verification.adapters.ring import RingAdapter
from ringray.verification.target import ADAPTERS
from tests.support import deepspeed_stand_in
from tests.support.verification import verified

MODELS = "tests.support.verified:"
NO_BOUNDARIES = "the model takes no boundaries of documents: nothing to compare"
NO_MASK = "ValueError: PyTorch's context_parallel takes no mask: expected whole sequences"
MULTIPLES = "it takes multiples only"
# Probes with nothing to try -> the reasons; of all others the verdict is right.
SKIPPED = {
    "torch-context-parallel": {"documents": NO_MASK, "padding": MULTIPLES},
    "torch-flex": {
        "padding": MULTIPLES,
        **dict.fromkeys(("loss", "labels", "uneven"), "the target returns no loss"),
        "gradients": "the target has no loss to go backward from",
        "norm": "the target has no gradients",
    },
    "accelerate": {"documents": NO_BOUNDARIES, "padding": MULTIPLES},
    "hf-ulysses": {"padding": "ValueError: a batch of 47 tokens: expected a multiple of 2 ranks"},
    "ddp": {"documents": NO_BOUNDARIES},
    "fsdp": {"documents": NO_BOUNDARIES},
}
# Probes of what layouts and models change; each adapter runs all of them once.
OF_LAYOUTS = "logits", "documents", "loss", "gradients", "norm", "padding"
# Probes of what not every model has.
OF_MODELS = "positions", "router", "dropout", "resume", "generation"
# A model that each runs, and one whose mistake shows on it.
RUN = {
    "ring": ("sdpa", "lost"),
    "parallelize": ("decoder", "lost_module"),
    "torch-context-parallel": ("sdpa", "lost"),
    "torch-flex": ("sdpa", "lost"),
    "accelerate": ("sdpa", "lost"),
    "ddp": ("sdpa", "batched"),
    "fsdp": ("sdpa", "batched"),
}
NOT_HERE = {
    name
    for name, package in (("hf-ulysses", "deepspeed"), ("accelerate", "accelerate"))
    if importlib.util.find_spec(package) is None
}


def run(model: str, adapter: str, *probes: str) -> Verdict:
    if adapter in NOT_HERE:
        pytest.skip("not installed")
    return verified(MODELS + model, adapter, probes=probes or None)


def right(verdict: Verdict) -> bool:
    """Tells whether all is right that an adapter says it does."""
    skipped = SKIPPED.get(verdict.adapter.partition(":")[0], {})
    if "llama" in verdict.target and NO_BOUNDARIES in skipped.values():
        skipped = {}  # its positions say where documents begin
    probes = {name: x for name, x in verdict.probes.items() if name not in OF_MODELS}
    want = {name: f"skipped: {skipped[name]}" if name in skipped else "right" for name in probes}
    assert probes == want, str(verdict)
    return verdict.right


def test_every_adapter_is_run() -> None:
    assert set(RUN) == set(ADAPTERS) - {"hf-ulysses"}


@pytest.mark.parametrize("adapter", RUN)
def test_a_right_model_has_no_finding(adapter: str) -> None:
    assert right(run(RUN[adapter][0], adapter))


@pytest.mark.parametrize("adapter", RUN)
def test_a_mistake_is_seen(adapter: str) -> None:
    verdict = run(RUN[adapter][1], adapter, "logits")
    (finding,) = verdict.findings
    assert finding.probe == "logits"
    assert finding.rank is not None


# Our models: a sample of partitions by transports, and what they are made of.


@pytest.mark.parametrize(
    ("model", "layout"),
    [("decoder", "striped,ulysses"), ("module", "balanced,allgather"), ("sdpa", "balanced")],
)
def test_our_layouts_have_no_finding(model: str, layout: str) -> None:
    assert right(run(model, f"ring:{layout}", *OF_LAYOUTS))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["decoder", "module", "sdpa", "llama"])
@pytest.mark.parametrize("place", range(len(TRANSPORTS)))
def test_all_our_layouts_have_no_finding(model: str, place: int) -> None:
    """Each model with each transport and each partition, in pairs that differ from model to
    model."""
    transport, shift = [*TRANSPORTS][place], ["decoder", "module", "sdpa", "llama"].index(model)
    text = f"ring:{NAMES[(place + shift) % len(NAMES)]},{transport}"
    assert right(run(model, text, *OF_LAYOUTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "adapter"),
    [("module", "parallelize"), ("llama", "parallelize"), ("llama", "ddp"), ("llama", "fsdp"),
     ("llama", "torch-context-parallel"), ("sdpa", "torch-context-parallel:alltoall"),
     ("llama", "torch-flex"), ("ringray_llama", "ring")],
)  # fmt: skip
def test_other_models_have_no_finding(model: str, adapter: str) -> None:
    assert right(run(model, adapter, *OF_LAYOUTS))


@pytest.mark.slow
def test_ulysses_of_a_stand_in_for_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepspeed_stand_in.as_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    verdict = verification.verify(
        MODELS + "llama", adapter="hf-ulysses", probes=OF_LAYOUTS, limit=1200
    )
    assert right(verdict)


# What others do otherwise


@pytest.mark.slow
def test_accelerate_lets_documents_see_each_other() -> None:
    """It drops the masks of transformers' models, and nothing refuses packed documents."""
    verdict = run("llama", "accelerate", "logits", "documents", "causality")
    wrong = {name for name, result in verdict.probes.items() if result == "wrong"}
    assert wrong == {"documents", "causality"}
    assert {finding.mistake for finding in verdict.findings} == {"documents", "follows"}


# What is said


def test_a_target_with_a_ring_of_its_own_generates_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "is_transformers", lambda model: True)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"the target has no function generate\(\)"):
        RingAdapter().generate(nn.Identity(), ids, 1)


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ("rings", "adapter: got 'rings', expected one of ring"),
        ("ring:alphabetical", "adapter ring:alphabetical: partition: got 'alphabetical'"),
        ("ring:zigzag,pigeons", "adapter ring:zigzag,pigeons: transport: got 'pigeons'"),
        ("ddp:fast", "adapter ddp:fast: "),
        ("torch-context-parallel:ring", "got 'ring', expected 'allgather' or 'alltoall'"),
    ],
)
def test_wrong_adapters_are_told(adapter: str, says: str) -> None:
    with pytest.raises(TargetError, match=says):
        verification.verify(MODELS + "sdpa", adapter=adapter)


@pytest.mark.parametrize("adapter", ["accelerate", "hf-ulysses"])
def test_a_missing_package_is_told(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r"needs \w+, which is not installed: pip install \w+"):
        verification.verify(MODELS + "sdpa", adapter=adapter)


def test_a_model_that_an_adapter_cannot_run_is_told() -> None:
    with pytest.raises(TargetError, match="tokens reach others without the ring"):
        verified(MODELS + "sdpa", "parallelize")
