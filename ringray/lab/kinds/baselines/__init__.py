"""Baselines: what a user would run in place of the ring, measured in turns with it.

sdpa               PyTorch's scaled_dot_product_attention
flex               PyTorch's FlexAttention, compiled
context-parallel   PyTorch's experimental context_parallel
ring-flash-attn    the package of this name

To add one, write ``ringray/lab/kinds/baselines/<name>.py`` with a function ``prepare(config,
context, q, k, v)``, which returns a function that attends, and give it a line in ``BASELINES``. The
modules need torch, so the table holds their paths and what plans check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringray_kernels.dtypes import DTYPES

if TYPE_CHECKING:
    from ringray.lab.trial.config import TrialConfig

DEFAULT = "sdpa"


@dataclass(frozen=True)
class BaselineKind:
    """A baseline.

    ``words``: its name in results. ``on_ring``: a package on GPUs, in which every rank computes its
    shard, dealt by the default partition, of elements of 16 bits with a causal mask alone; else the
    first rank computes the whole problem. ``rows_first``: it takes tensors (B, S, H, D).
    ``gradients_on_cpu``: it has a backward pass there, too.
    """

    module: str
    words: str
    on_ring: bool = False
    rows_first: bool = False
    gradients_on_cpu: bool = True

    @property
    def where(self) -> str:
        """Returns where it is computed, in words."""
        return "on the same ring" if self.on_ring else "in one process"

    def unsupported(self, config: TrialConfig, device: str) -> str | None:
        """Returns why it cannot compute a point on ``device`` (cpu, cuda, auto), or None."""
        problem = config.problem
        if self.on_ring and device == "cpu":
            return f"{self.words} runs on cuda only, got {device}"
        if problem.has_backward and device == "cpu" and not self.gradients_on_cpu:
            return f"{self.words} has no gradients on {device}, got {problem.direction}"
        if self.on_ring and config.ring.size == 1:
            return f"{self.words} needs at least 2 ranks, got a ring of 1"
        if self.on_ring and DTYPES[problem.dtype].itemsize != 2:
            return f"{self.words} takes elements of 16 bits, got {problem.dtype}"
        if problem.rescored or problem.sinks:
            return f"{self.words} takes neither softcap, sinks, alibi nor dropout here"
        if self.on_ring and problem.value_dim != problem.head_dim:
            return (
                f"{self.words} takes one head dim, got {problem.head_dim} and {problem.value_dim}"
            )
        if self.on_ring and not (problem.causal and problem.mask.plain):
            return f"{self.words} takes causal: true without any other mask"
        return None


BASELINES: dict[str, BaselineKind] = {
    "sdpa": BaselineKind("ringray.lab.kinds.baselines.sdpa", "SDPA"),
    "flex": BaselineKind(
        "ringray.lab.kinds.baselines.flex", "FlexAttention", gradients_on_cpu=False
    ),
    "context-parallel": BaselineKind(
        "ringray.lab.kinds.baselines.context_parallel",
        "PyTorch's context_parallel",
        on_ring=True,
    ),
    "ring-flash-attn": BaselineKind(
        "ringray.lab.kinds.baselines.ring_flash_attn",
        "ring-flash-attn",
        on_ring=True,
        rows_first=True,
    ),
}
