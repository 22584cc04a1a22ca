"""Kernel-tune: how long one rank's attention takes with one way of cutting it, once it is right.

Ranks measure alone, each another point. A point is checked against the oracle on a length that one
can afford before it is timed; on a GPU its kernels are compiled and looked at before they run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ringray.lab.kinds import correctness, latency
from ringray.lab.trial.measurement import RankReport
from ringray_kernels.config import Blocks, Kernel, Problem, supports, target_named
from ringray_kernels.dtypes import DTYPES

if TYPE_CHECKING:
    import torch

    from ringray.lab.kinds.base import RankContext
    from ringray.lab.trial.config import TrialConfig

CHECKED = 1021  # tokens: odd, and several tiles of the largest block


def run(config: TrialConfig, context: RankContext) -> RankReport:
    """Check and measure one trial on this rank."""
    blocks = config.cut
    if context.device.type == "cuda" and isinstance(blocks, Blocks):
        refused = unfit(config, blocks, context.device)
        if refused:
            return RankReport(rank=context.rank, refused=refused)
    checked = correctness.run(_shortened(config), context)
    if checked.failure or any(not share <= 1 for share in checked.errors.values()):
        return checked
    report = latency.run(config, context)
    report.errors = checked.errors
    return report


def _shortened(config: TrialConfig) -> TrialConfig:
    """The same kernels on a length that the oracle can afford."""
    length = min(config.seq_len, CHECKED)
    documents = config.documents
    if isinstance(documents, tuple):
        documents = len(documents)
    return replace(config, seq_len=length, documents=documents, warmup=0, repeats=1)


def unfit(config: TrialConfig, blocks: Blocks, device: torch.device) -> str | None:
    """Why this GPU should not run ``blocks``: it cannot, or they spill in the inner loops."""
    from ringray_kernels.backends.triton.arguments import architecture
    from ringray_kernels.inspect.compiled import Case, compile_case

    target = target_named(architecture(device))
    kernels: tuple[Kernel, ...] = ("forward", "dq", "dkv")
    group = config.heads // config.kv_heads
    itemsize = DTYPES[config.dtype].itemsize
    for kernel in kernels:
        given = getattr(blocks, kernel)
        if given is None:
            continue
        reason = supports(given, Problem(kernel, config.head_dim, itemsize, group), target)
        if reason is not None:
            return f"{kernel}={given}: {reason}"
        case = Case(target.name, kernel, config.head_dim, config.dtype, group, given)
        try:
            spilled = compile_case(case).inner_spilled
        except Exception as error:  # triton's and ptxas' own, of many types
            return f"{kernel}={given}: does not compile: {type(error).__name__}: {error}"[:500]
        if spilled:
            return f"{kernel}={given}: spills {spilled} bytes a thread in its loops"
    return None
