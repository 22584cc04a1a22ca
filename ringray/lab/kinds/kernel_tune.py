"""Kernel-tune: the time of one rank's attention with one way of cutting it, after a check.

Ranks measure alone, each another point. A point is checked against the oracle on a short length
before it is timed; on a GPU its kernels are compiled and inspected before they run.
"""

from __future__ import annotations

import torch

from ringray.lab.kinds import correctness, latency
from ringray.lab.kinds.base import RankContext
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.measurement import RankReport
from ringray_kernels.config import Blocks, supports, target_named

CHECKED = 1021  # tokens: odd, and several tiles of the largest block


def run(config: TrialConfig, context: RankContext) -> RankReport:
    """Checks and measures one trial on this rank."""
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
    """Returns the trial with a length that the oracle can afford."""
    length = min(config.problem.seq_len, CHECKED)
    documents = config.problem.documents
    if isinstance(documents, tuple):
        documents = len(documents)
    return config.changed(seq_len=length, documents=documents, warmup=0, repeats=1)


def unfit(config: TrialConfig, blocks: Blocks, device: torch.device) -> str | None:
    """Explains why this GPU should not run ``blocks``: it cannot, or their loops over whole
    tiles spill."""
    from ringray_kernels.backends.triton.arguments import architecture
    from ringray_kernels.inspect.compiled import Case, compile_case

    problem, target = config.problem, target_named(architecture(device))
    group = problem.heads // problem.kv_heads
    for kernel, block in blocks.given.items():
        reason = supports(block, problem.of_kernel(kernel), target)
        if reason is not None:
            return f"{kernel}={block}: {reason}"
        case = Case(
            target.name,
            kernel,
            problem.head_dim,
            problem.dtype,
            group,
            block,
            value_dim=problem.value_dim,
            softcap=problem.softcap,
            bias=(1, 2 * group) if problem.alibi else (),
            dropout_p=problem.dropout_p or 0.0,
            quantized=problem.quantize is not None and kernel == "forward",
        )
        try:
            spilled = compile_case(case).whole_spilled
        except Exception as error:  # of Triton or ptxas, of many types
            return f"{kernel}={block}: does not compile: {type(error).__name__}: {error}"[:500]
        if spilled:
            return f"{kernel}={block}: spills {spilled} bytes a thread in its loops"
    return None
