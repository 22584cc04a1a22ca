"""torchtitan's context parallelism on the ring, against the installed release."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "titan_program.py"


def losses(*groups: str) -> dict[str, list[float]]:
    """Losses of a Trainer in processes of their own: it changes what is global in its process."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *groups],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    by_case: dict[str, list[float]] = {}
    for printed in re.findall("losses: (.*)", done.stdout):
        by_case |= json.loads(printed)
    return by_case


@pytest.mark.slow
def test_losses_are_those_of_its_own_attention_in_one_process() -> None:
    ring = losses("1=plain:50,spmd_types:5", "2=partial_dtensor:50,full_dtensor:5")
    want = ring["plain:50"]
    assert len(want) == 50
    assert want[-1] < 0.5 * want[0]
    worst = max(abs(a - b) / b for a, b in zip(ring["partial_dtensor:50"], want, strict=True))
    print(f"torchtitan: 50 steps, losses differ by {worst:.1e} at most")
    assert worst < 1e-4
    assert ring["spmd_types:5"] == pytest.approx(want[:5], rel=1e-4)
    # With this backend torchtitan logs the sum of what every rank already has.
    both = [2 * loss for loss in want[:5]]
    assert ring["full_dtensor:5"] == pytest.approx(both, rel=1e-4)


def parallelized(config: Any, **overrides: Any) -> None:
    """Does what the Trainer does before its first step, so far as the ring is concerned."""
    with torch.device("meta"):
        model = config.model_spec.model.build()
    options = {"context_parallel_load_balancer": "headtail", **overrides}
    dims = SimpleNamespace(cp_enabled=True, get_optional_mesh=lambda *_, **__: None)
    config.model_spec.parallelize_fn(
        model, parallel_dims=dims, parallelism=SimpleNamespace(**options)
    )


def test_what_a_ring_has_not_is_refused() -> None:
    """By a sentence, before anything is trained."""
    from torchtitan.models import gpt_oss, llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention

    from ringray.plugins.torchtitan import RingInnerAttention, use_ring

    def config(inner: Any = None, registry: Any = llama3) -> Any:
        spec = registry.model_registry("debugmodel")
        spec.model.layers = spec.model.layers[:1]
        if inner is not None:
            spec.model.layers[0].attention.inner_attention = inner
        return SimpleNamespace(model_spec=spec)

    refused = partial(pytest.raises, ValueError)
    with refused(match="without a decoder"):
        use_ring(SimpleNamespace(model_spec=None))
    with refused(match="ScaledDotProductAttention.Config.*expected FlexAttention.Config"):
        use_ring(config(ScaledDotProductAttention.Config()))
    with refused(match="window_size of .keys before a query or -1, 0."):
        use_ring(config(VarlenAttention.Config(window_size=(4, 4))))
    linear = config()
    linear.model_spec.model.layers[0].attention = None
    with refused(match="layer 0 without attention"):
        use_ring(linear)
    with refused(match="GptOssModel, which makes masks of its own"):
        parallelized(use_ring(config(registry=gpt_oss)))
    with refused(match="load_balancer: got 'ptrr', expected 'headtail'"):
        parallelized(use_ring(config()), context_parallel_load_balancer="ptrr")
    # Windows come over, and no module attends before it has its ring.
    windowed = use_ring(config(VarlenAttention.Config(window_size=(4, 0))), transport="allgather")
    inner = windowed.model_spec.model.layers[0].attention.inner_attention
    assert (inner.window, inner.transport) == (4, "allgather")
    q = torch.zeros(1, 8, 2, 16)
    made = inner.build()
    assert isinstance(made, RingInnerAttention)
    with refused(match="not parallelized"):
        made(q, q, q)
    with refused(match="got out_transform, which a ring has not"):
        made(q, q, q, out_transform=lambda *_: q)


def test_documents_begin_where_positions_do() -> None:
    """So do the rest of one that began in a sequence before, and rows with fewer documents."""
    from ringray.plugins.torchtitan import _documents

    positions = torch.tensor([[5, 6, 0, 1], [0, 1, 2, 3]])
    assert _documents(positions, None).tolist() == [[0, 2, 4], [0, 4, 4]]
