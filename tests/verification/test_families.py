"""Twenty families of transformers on our ring: nothing is found."""

from __future__ import annotations

import pytest

from tests.support.verification import verified

QUICK = ("mistral", "gpt2")  # windows and learned positions
SLOW = (
    "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "opt",
    "olmo2", "olmo3", "cohere2", "granite", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss",
    "smollm3", "glm4", "starcoder2", "seed_oss",
)  # fmt: skip

# Probes in which families differ: masks, positions, losses of their own, caches.
OF_FAMILIES = (
    "logits", "documents", "positions", "router", "loss", "gradients", "generation",
)  # fmt: skip
WITHOUT_A_CACHE = {"deepseek_v3"}  # whose steps attend to other keys, which generate() refuses


def finds_nothing(kind: str, *probes: str) -> None:
    verdict = verified(f"tests.support.verified:{kind}", probes=probes or None)
    assert verdict.right, str(verdict)
    skipped = {name for name, result in verdict.probes.items() if result != "right"}
    assert ("generation" in skipped) == (kind in WITHOUT_A_CACHE), str(verdict)
    assert skipped <= {"positions", "router", "dropout", "generation"}, str(verdict)


@pytest.mark.parametrize("kind", QUICK)
def test_a_family_has_no_finding(kind: str) -> None:
    finds_nothing(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW)
def test_families_have_no_finding(kind: str) -> None:
    finds_nothing(kind, *OF_FAMILIES)
