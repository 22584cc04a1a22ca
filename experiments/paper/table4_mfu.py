"""Table 4 of the ring attention paper: MFU with a ring over the MFU that its FLOPs let expect.

    python experiments/paper/table4_mfu.py
    python experiments/paper/table4_mfu.py --measured  # two minutes, 2 cores

The paper draws its values and prints none. In words it says that the overhead is negligible: a
longer context lowers MFU by the larger share of attention alone, which is slower than dense
products, and the ring by nothing more. Taken from the paper: the models, clusters and contexts
(Table 3), 2M tokens a step on A100 and 4M on TPU v4, FSDP, layers that keep their input, the
links (Table 2), its formula, by which all pairs are computed and counted. Computed: the MFU with
the simulated ring, over that of the same step without any message, by rates of hardware.yaml.
``--measured`` trains a tiny model on this machine (table4_mfu.yaml): on one process with two
threads, and on a ring of two with one thread each.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

from comparison import Row, measured, show

from ringray.lab.predict import cost_model, hardware, transformer
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Fleet
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.predict.rank_memory import Training
from ringray.models.sizes import named
from ringray.training.recipe import Degrees

K, M = 1 << 10, 1 << 20
# Model, fleet, bytes/s between its devices, context of one device and of the ring, tokens a step;
# TPUv4-1024 has 512 chips.
CASES = (
    ("7b", "a100:8", 300e9, 32 * K, 256 * K, 2 * M),
    ("13b", "a100:8", 300e9, 16 * K, 128 * K, 2 * M),
    ("13b", "a100:4x8", 12.5e9, 64 * K, 2 * M, 2 * M),
    ("30b", "tpu-v4:512", 268e9, 8 * K, 2 * M, 4 * M),
    ("65b", "tpu-v4:512", 268e9, 8 * K, M, 4 * M),
)


class Utilization(NamedTuple):
    """MFU on one device each, and on a ring: expected, and with its messages."""

    alone: float
    expected: float
    ring: float


def utilization(name: str, on: Fleet, short: int, long: int, tokens: int) -> Utilization:
    """Returns MFU by the paper's formula."""
    model = named(f"llama-{name}", {})

    def mfu(context: int, degrees: Degrees, *, messages: bool = True) -> float:
        training = Training(context, max(tokens // context, degrees.dp))
        request = TrainingRequest(model, on, context, training.sequences)
        both, forward = (
            cost_model.predict(request.attention(degrees, causal=False, direction=which), on)
            for which in ("forward+backward", "forward")
        )
        if not messages:
            both, forward = unhindered(both), unhindered(forward)
        time = transformer.step(model, degrees, training, on, forward, both)
        flops = 3 * training.sequences * model.paper_flops(context)
        return flops / (time.total * on.ranks * on.hardware.peak["bfloat16"])

    ring = Degrees(dp=on.ranks * short // long, cp=long // short)
    return Utilization(
        mfu(short, Degrees(dp=on.ranks)), mfu(long, ring, messages=False), mfu(long, ring)
    )


def unhindered(cost: Cost) -> Cost:
    """Returns the cost without its messages."""
    time = cost.time_ms - cost.exposed_ms
    return cost._replace(time_ms=time, exposed_ms=0.0, inner_bytes=0, outer_bytes=0)


def linked(text: str, bandwidth: float) -> Fleet:
    """Returns the fleet with Table 2's bandwidth for its slowest link."""
    on = hardware.parse_fleet(text)
    which = "outer" if on.nodes > 1 else "inner"
    link = getattr(on.hardware, which).model_copy(update={"bandwidth": bandwidth})
    return replace(on, hardware=on.hardware.model_copy(update={which: link}))


def rows() -> list[Row]:
    """Returns all cases."""
    found = []
    for name, fleet, bandwidth, short, long, tokens in CASES:
        got = utilization(name, linked(fleet, bandwidth), short, long, tokens)
        note = f"MFU: {got.alone:.0%} at {short // K}k, expected {got.expected:.0%}, {got.ring:.0%}"
        cell = f"{name.upper()}, {fleet}, {short // K}k to {long // K:,}k"
        found.append(Row(cell, None, got.ring / got.expected, note))
    return found


def trained() -> list[Row]:
    """Returns the throughput of a ring of two over that of one process on the same cores."""
    cells = {
        (row.config["ring_size"], row.config["threads"]): row for row in measured("table4_mfu")
    }
    alone, ring = (cells[cell].metrics["tokens_per_s"] for cell in ((1, 2), (2, 1)))
    note = f"{alone:,.0f} and {ring:,.0f} tokens/s"
    return [Row("tiny, 16k, ring of 2 over one process", None, ring / alone, note)]


if __name__ == "__main__":
    if "--measured" in sys.argv:
        show("Table 4: tokens/s of a ring on this machine", trained(), "ratio")
    else:
        show("Table 4: MFU of the ring over what its FLOPs let expect", rows(), "ratio")
