"""Tables of the page on strategies: predictions of `ringray advise` and `ringray plan`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from statistics import mean

from ringray import partition, transport
from ringray.base import units
from ringray.base.errors import UserError
from ringray.lab.plan.plan import build
from ringray.lab.predict import advise, calibration
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.specs import model as specs
from ringray.lab.trial.config import TrialConfig
from ringray.models import sizes
from ringray.traffic.walk import BACKWARDS

_ASKED = (("8b", "h100:8"), ("8b", "h100:8x8"), ("70b", "h100:8x8"), ("70b", "h100:64x8"))
_CONTEXTS = {"32k": 1 << 15, "128k": 1 << 17, "1M": 1 << 20}
_BATCH = 4 << 20  # tokens of a step, as `advise` takes them
_MASKS = {
    "causal": "",
    "window of 4k": "window: 4096",
    "packed documents": "documents: {lengths: lengths/prolong512k.csv}",
    "chunks of 8k": "chunk: 8192",
    "full": "causal: false",
}
_TABLES = ("prolong512k", "magi")
_FLEETS = (("h100:8", 8), ("h100:4x8", 32))
_BATCHES = 8
_DEALS = (
    ("contiguous", "ring"),
    ("zigzag", "ring"),
    ("zigzag", "hybrid:8"),
    ("balanced", "ring"),
    ("balanced", "direct"),
    ("balanced", "hybrid:8"),
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes a table; the first column is text, the others are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def degrees() -> str:
    """Writes the fastest layout of each context, model and fleet."""
    rows = [
        [context, *(_fastest(name, tokens, fleet) for name, fleet in _ASKED)]
        for context, tokens in _CONTEXTS.items()
    ]
    return table(["context", *(f"`{name} --on {fleet}`" for name, fleet in _ASKED)], rows)


def _fastest(name: str, tokens: int, fleet: str) -> str:
    batch = max(1, _BATCH // tokens)
    request = TrainingRequest(sizes.named(name, {}), calibration.fleet(fleet), tokens, batch)
    try:
        (best,) = advise.advise(request, 1)
    except UserError:
        return "does not fit"
    split = [f"{name.upper()} {n}" for name, n in asdict(best.degrees).items() if n > 1]
    how = f"`{best.config.strategy.transport}`" if best.degrees.cp > 1 else "no ring"
    mfu = best.mfu(request, request.model.forward_flops(tokens))
    memory = f"{units.memory(best.memory.total)}, room {units.memory(best.room)}"
    return f"{' × '.join(split)}<br>{how}, {mfu:.0%} MFU, {memory}"


def by_partition() -> str:
    """Writes how the partitions compare under each mask."""
    names = ", ".join(partition.NAMES)
    rows = []
    for title, mask in _MASKS.items():
        costs = _planned(f"seq_len: 128k, {mask}", f"partition: [{names}]", "h100:8")
        rows.append([title, *_compared(costs.values())])
    return table(["mask", *(f"`{name}`" for name in partition.NAMES)], rows)


def by_deal() -> str:
    """Writes how partitions and transports compare on drawn documents, in the mean of batches."""
    rows = []
    for name, (fleet, ranks) in itertools.product(_TABLES, _FLEETS):
        batches = (f"{{lengths: lengths/{name}.csv, seed: {seed}}}" for seed in range(_BATCHES))
        problem = f"seq_len: {ranks << 14}, documents: [{', '.join(batches)}]"
        cells = []
        for deal, transport_name in _DEALS:
            strategy = f"partition: {deal}, transport: '{transport_name}'"
            costs = _planned(problem, strategy, fleet, ranks).values()
            ms, sent, balance = (
                mean(getattr(cost, of) for cost in costs)
                for of in ("time_ms", "sent_bytes", "balance")
            )
            cells.append(f"{ms:.3g} ms<br>{units.memory(sent)}, balance {balance:.2f}")
        rows.append([f"{name} on `{fleet}`", *cells])
    return table(["documents", *(f"`{deal}`, `{name}`" for deal, name in _DEALS)], rows)


def by_transport() -> str:
    """Writes how the transports compare at several lengths, within a node and between nodes."""
    rows = []
    for length in ("16k", "128k", "1M"):
        for fleet, ranks in (("h100:8", 8), ("h100:2x8", 16)):
            listed = ", ".join(f"'{one}'" for one in transport.searched(ranks, 32, 8))
            costs = _planned(f"seq_len: {length}", f"transport: [{listed}]", fleet, ranks)
            ranked = sorted(costs.items(), key=lambda one: one[1].time_ms)
            said = [f"`{config.strategy.transport}` {_time(cost)}" for config, cost in ranked]
            rows.append([f"{length} on `{fleet}`", *said[:3], said[-1]])
    return table(["tokens", "fastest", "second", "third", "slowest"], rows)


def by_walk() -> str:
    """Writes the bytes and times of the walks back with more and fewer K/V heads."""
    rows = []
    for heads in (32, 8, 1):
        problem = f"seq_len: 128k, kv_heads: {heads}"
        costs = _planned(problem, f"backward: [{', '.join(BACKWARDS)}]", "h100:2x4")
        rows.append([f"32 heads, {heads} K/V", *_compared(costs.values())])
    return table(["heads", *(f"`{name}`" for name in BACKWARDS)], rows)


def _planned(problem: str, strategy: str, fleet: str, ranks: int = 8) -> dict[TrialConfig, Cost]:
    """Returns the points of a spec with their predicted costs, without those that are pruned."""
    heads = "" if "kv_heads" in problem else "kv_heads: 8, "
    text = (
        f"version: 1\nname: choosing\nkind: latency\nring: {{size: {ranks}, device: cuda}}\n"
        f"problem: {{heads: 32, {heads}head_dim: 128, {problem.rstrip(', ')}}}\n"
        f"strategy: {{{strategy}}}\n"
    )
    trials = build(specs.parse(text), calibration.fleet(fleet)).runnable
    return {trial.config: trial.predicted for trial in trials if trial.predicted}


def _compared(costs: Collection[Cost]) -> list[str]:
    """Writes time, traffic and balance of each; the fastest is bold."""
    best = min(cost.time_ms for cost in costs)
    return [
        f"{f'**{_time(cost)}**' if cost.time_ms == best else _time(cost)}"
        f"<br>{units.memory(cost.sent_bytes)}, balance {cost.balance:.2f}"
        for cost in costs
    ]


def _time(cost: Cost) -> str:
    ms = cost.time_ms
    return f"{ms:.3g} ms" if ms < 1000 else units.duration(ms / 1e3)


PARTS: dict[str, Callable[[], str]] = {
    "degrees": degrees,
    "partitions by mask": by_partition,
    "drawn documents": by_deal,
    "transports by length": by_transport,
    "walks back by heads": by_walk,
}
