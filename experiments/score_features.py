"""Times of the portable kernels on a GPU with a soft cap, ALiBi and dropout, by configuration.

    PYTHONPATH=.:kernels python experiments/score_features.py FILE

One causal sequence of 16k tokens, 16 heads x 128, bf16. The configurations of a feature take turns;
medians go to FILE as JSON lines. Each result is compared with that of the defaults, in norm, and
with a second call, bitwise. FlexAttention follows where it takes the feature.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ringray_kernels
from ringray_kernels.bench.problems import Point, make_inputs
from ringray_kernels.bias import Bias
from ringray_kernels.config import Blocks
from ringray_kernels.dropout import Dropout
from ringray_kernels.intervals import Positions, intervals

POINT = Point("causal", 16 * 1024)
SOFTCAP = 30.0
CONFIGS = (
    "forward=128x128/8/2/descriptors", "forward=128x64/8/2", "forward=128x64/8/3/descriptors",
    "dkv=64x64/4/2/descriptors", "dkv=64x128/8/2/descriptors", "dq=64x64/4/2/descriptors",
    "dq=128x64/8/3/descriptors",
)  # fmt: skip
TURNS, WARM_UP = 12, 2


def main(path: Path) -> None:
    """Measures every feature."""
    device = torch.device("cuda")
    inputs = make_inputs(POINT, device, 0)
    positions = torch.arange(POINT.seq_len, device=device, dtype=torch.int32)
    slopes = torch.tensor([[2 ** (-8 * (h + 1) / POINT.heads) for h in range(POINT.heads)]])
    features: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": SOFTCAP},
        "alibi": {"bias": Bias(positions, positions, slopes.to(device))},
        "dropout": {"dropout": Dropout(0.1, 7), "at": Positions(positions, positions)},
    }
    head_slopes = slopes[0].to(device)
    changes: dict[str, Callable[..., Tensor]] = {
        "softcap": lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP),
        "alibi": lambda score, b, h, i, j: score - head_slopes[h] * (i - j).abs(),
    }
    for name, feature in features.items():
        for direction in ("forward", "backward"):
            calls = ours(inputs, feature, direction)
            if name in changes:
                calls["flex-attention"] = flex(inputs, changes[name], direction)
            for line in measured(calls, direction):
                line = {"feature": name, "direction": direction, **line}
                print(json.dumps(line), flush=True)
                with path.open("a", encoding="utf-8") as file:
                    print(json.dumps(line), file=file)


def ours(inputs: Any, feature: dict[str, Any], direction: str) -> dict[str, Callable[[], Any]]:
    """Returns a call by configuration; its results are a tuple of tensors."""
    q, k, v, dout = inputs
    rows = torch.arange(POINT.seq_len, device=q.device)
    start, end = (bound[None] for bound in intervals(*POINT.visible(q.device), rows))
    common = {**feature, "scale": POINT.scale, "backend": "triton"}

    def forward(blocks: Blocks | None = None) -> Any:
        return ringray_kernels.forward(
            q, k, v, start, end, out_dtype=q.dtype, blocks=blocks, **common
        )

    out, lse = forward()
    delta = ringray_kernels.delta(dout, out, lse, backend="triton")

    def backward(blocks: Blocks | None = None) -> tuple[Tensor, ...]:
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        ringray_kernels.backward(
            dout, q, k, v, lse, delta, start, end, dq=dq, dk=dk, dv=dv, blocks=blocks, **common
        )
        return dq, dk, dv

    call = forward if direction == "forward" else backward
    calls: dict[str, Callable[[], Any]] = {"default": call}
    for text in CONFIGS:
        if text.startswith("forward") == (direction == "forward"):
            calls[text] = partial(call, Blocks.parse(text))
    return calls


def flex(inputs: Any, change: Callable[..., Tensor], direction: str) -> Callable[[], Any]:
    """Returns FlexAttention's call with a change of scores."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    size = POINT.seq_len
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device="cuda")
    attend: Any = torch.compile(flex_attention, dynamic=False)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]

    def forward() -> tuple[Tensor]:
        return (attend(*leaves, score_mod=change, block_mask=mask),)

    (out,) = forward()
    if direction == "forward":
        return forward
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def measured(calls: dict[str, Callable[[], Any]], direction: str) -> list[dict[str, Any]]:
    """Returns a line for each call, after all have taken turns."""
    expected = calls["default"]()[0].float()
    lines = {}
    for name, call in calls.items():
        first, second = call()[0], call()[0]
        error = ((first.float() - expected).norm() / expected.norm()).item()
        repeats = torch.equal(first, second)
        lines[name] = {"config": name, "against_default": error, "repeats": repeats}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS):
        for name in list(calls) if turn % 2 else reversed(calls):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[name]()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    flops = POINT.flops * (2.5 if direction == "backward" else 1)
    for name, line in lines.items():
        milliseconds = statistics.median(times[name][WARM_UP:])
        line |= {"ms": round(milliseconds, 4), "tflops": round(flops / milliseconds / 1e9, 1)}
    return [*lines.values()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
