"""The answers of ``advise``, as JSON and in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ringray.base import units
from ringray.base.errors import UserError
from ringray.lab.predict import advise as advice
from ringray.lab.predict import layouts, rank_memory
from ringray.lab.predict.advise import Proposal
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.predict.pooling import Pooled
from ringray.lab.report import tables, words
from ringray.training.recipe import Degrees

DEGREES = ("dp", "cp", "tp", "pp", "ep")
# What avoids whole logits, and activations that are kept.
_CHUNKED = (
    'how, Hugging Face: use_liger_kernel=True, or TRL\'s loss_type="chunked_nll"; '
    "a loop of one's own: ringray.nn.sharded_linear_cross_entropy"
)
_CHECKPOINTED = (
    "how, Hugging Face: gradient_checkpointing=True, which keeps `input`; a loop of one's own: "
    "Decoder(kept=...), or torch.utils.checkpoint around what is computed again"
)

# As JSON, and as lines and tables, without the lines of the JSON's assumptions.
Answer = tuple[dict[str, Any], list[Any]]


def fastest(request: TrainingRequest, ranked: list[Proposal]) -> Answer:
    """Answers with the proposals, the first one in parts."""
    rows = [_row(request, proposal) for proposal in ranked]
    alone = layouts.least(replace(request, sequences=1), Degrees()).memory.total
    ring, first = advice.smallest_ring(request), ranked[0]
    assumed = advice.assumptions(request, first)
    answer = _asked(request) | {"context": request.context, "sequences": request.sequences}
    answer |= {"one_rank_bytes": alone, "smallest_ring": _row(request, ring), "proposals": rows}
    answer |= {"assumptions": assumed}
    enough = "enough" if alone <= request.usable_bytes else "not enough"
    usable = units.memory(request.usable_bytes)
    if answer["usable_bytes"] is None:
        enough, usable = "perhaps", "unknown amount"
    seconds = first.time.total
    shares = {name: value / seconds for name, value in first.time.parts.items()}
    parts = (f"{name} {share:.1%}" for name, share in shares.items() if share >= 0.0005)
    takes, slower = units.memory(alone), ring.time.total / seconds
    needed = "needed; the smallest" if ring.degrees.cp > 1 else "not needed; without one"
    before = [
        f"{_training(request)} on {request.on}{words.fitted(request.on.hardware)}",
        *filter(None, [words.linked(request.on)]),
        f"One rank: {enough}, a sequence takes {takes} of the {usable} that can be used",
        f"Ring: {needed}: {ring.degrees} fits, in {slower:.2f} x the time of 1\n",
    ]
    after = (
        f"\n{_order(ranked)}; a time is good to ±{first.time.spread:.0%} (80%)\n"
        f"Time of 1: {', '.join(parts)}\nMemory of 1: {first.memory}, "
        f"total {units.memory(first.memory.total)}"
    )
    numbered = ({"#": str(number)} | _cells(row) for number, row in enumerate(rows, 1))
    table = _table(_headings(request), numbered)
    return answer, [*before, table, after, *_excluded(request, first)]


def _order(ranked: list[Proposal]) -> str:
    """Writes how much slower each proposal is than the fastest way, and what counts as equal."""
    slower = (f"{number} by {way.slower:.1%}" for number, way in enumerate(ranked, 1))
    return (
        f"Slower than the fastest way: {', '.join(slower)}; up to {advice.EQUAL:.0%} count as "
        "equal, and then more room comes first"
    )


def _excluded(request: TrainingRequest, first: Proposal) -> list[str]:
    """Writes what the memory of a proposal leaves out, and how a training avoids it."""
    lines = []
    everything = {"kept": "all", "mlp_rows": None, "offload": False}
    for what, changed, avoided in (
        ("whole logits", {"loss_rows": None}, _CHUNKED),
        ("all that layers could keep", everything, _CHECKPOINTED),
    ):
        training, peak = replace(first.training, **changed), first.both.peak_memory_bytes
        memory = rank_memory.memory(request.model, first.degrees, training, peak)
        further = memory.total - first.memory.total
        if further > 0:
            lines.append(f"Left out: {what}, {units.memory(further)} more; {avoided}")
    return lines


def of_pool(file: str, best: Proposal, pooled: Pooled) -> str:
    """Writes how one pool of ranks compares with the rings of the best proposal."""
    degrees, strategy = best.degrees, best.config.strategy
    rings, pool = (units.digits(ms, " ms") for ms in (pooled.rings, pooled.pool))
    return (
        f"Packed documents of {file}: attention of a layer takes {rings} in rings of DP "
        f"{degrees.dp} x CP {degrees.cp} ({strategy.partition}, {strategy.transport}), {pool} in "
        f"one pool of {pooled.ranks} (balanced, {pooled.transport}): "
        f"{pooled.pool / pooled.rings:.2f} x the time"
    )


_PRICES = ("price/step", "price/1M tokens")
_TEXTS = ("fleet", "layout", "transport", "partition", "walk back", "kept", "limited by")


def _headings(request: TrainingRequest) -> list[str]:
    """Lists the columns of proposals; the paper counts layers of one kind."""
    degrees = map(str.upper, DEGREES if request.experts else DEGREES[:-1])
    paper = [] if request.model.mixed else ["paper's"]
    prices = [] if request.on.hardware.price is None else _PRICES
    return [
        "#", *degrees, "transport", "partition", "walk back", "kept", "step", "tokens/s", "MFU",
        *paper, "memory/rank", "room", *prices, "limited by",
    ]  # fmt: skip


def _table(headings: Sequence[str], rows: Iterable[dict[str, str]]) -> Any:
    table = tables.bare_table(*headings, texts=_TEXTS)
    for cells in rows:
        table.add_row(*(cells[heading] for heading in headings))
    return table


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """Writes a proposal, by heading."""
    room, degrees = row["room_bytes"], {k.upper(): str(n) for k, n in row["degrees"].items()}
    return degrees | {
        "layout": str(Degrees(**row["degrees"])),
        "transport": row["transport"],
        "partition": row["partition"],
        "walk back": row["backward"],
        "kept": str(row["kept"]) + ", offloaded" * row["offload"],
        "step": units.duration(row["step_s"]),
        "±": f"{row['spread']:.0%}",
        "tokens/s": units.digits(row["tokens_per_s"]),
        "MFU": units.share(row["mfu"]),
        "paper's": units.share(row["mfu_paper"]),
        "memory/rank": units.memory(row["memory_bytes"]["total"]),
        "room": "unknown" if room is None else units.memory(room),
        "price/step": units.digits(row["price_per_step"]),
        "price/1M tokens": units.digits(row["price_per_million_tokens"]),
        "limited by": row["limit"],
    }


def _row(request: TrainingRequest, proposal: Proposal) -> dict[str, Any]:
    seconds, price = proposal.time.total, request.on.hardware.price
    strategy = proposal.config.strategy
    tokens = request.sequences * request.context
    hours = request.on.ranks * seconds / 3600  # of ranks, for a step
    return {
        "degrees": asdict(proposal.degrees),
        **{name: getattr(strategy, name) for name in ("transport", "partition", "backward")},
        **{name: getattr(proposal.training, name) for name in ("kept", "offload", "mlp_rows")},
        "step_s": seconds,
        "slower": proposal.slower,
        "spread": proposal.time.spread,
        "parts_s": proposal.time.parts,
        "tokens_per_s": tokens / seconds,
        "mfu": proposal.mfu(request, request.model.forward_flops(request.context)),
        "mfu_paper": proposal.mfu(request, request.model.paper_flops(request.context)),
        "memory_bytes": proposal.memory.as_dict(),
        "room_bytes": None if math.isinf(proposal.room) else proposal.room,
        "limit": proposal.limit(request.on),
        "rank_hours_per_million_tokens": hours / tokens * 1e6,
        "price_per_step": price and hours * price,
        "price_per_million_tokens": price and hours * price / tokens * 1e6,
    }


def compared(requests: Sequence[TrainingRequest]) -> Answer:
    """Answers with the best layout of each fleet, the fastest and the cheapest of them."""
    fleets: list[dict[str, Any]] = []
    assumed: dict[str, None] = {}
    for request in requests:
        fleet: dict[str, Any] = {"on": str(request.on), "price": request.on.hardware.price}
        fleet |= {"proposal": None, "reason": None}
        try:
            best = advice.advise(request, 1)[0]
            fleet["proposal"] = _row(request, best)
            assumed |= dict.fromkeys(advice.assumptions(request, best))
        except UserError as error:
            fleet["reason"] = str(error)
        fleets.append(fleet)
    fitting = [fleet for fleet in fleets if fleet["proposal"]]
    named = {}
    for name, key in (("fastest", "step_s"), ("cheapest", "price_per_million_tokens")):
        candidates = [fleet for fleet in fitting if fleet["proposal"][key] is not None]
        first = min(candidates, key=lambda fleet: fleet["proposal"][key], default=None)
        named[name] = first and first["on"]
    lines = [f"{name.capitalize()}: {on}" for name, on in named.items() if on]
    if fitting and named["cheapest"] is None:
        lines.append("Cheapest: no price is known; give --price P or FLEET=P, of a rank and hour")
    elif unpriced := [fleet["on"] for fleet in fitting if fleet["price"] is None]:
        lines.append(f"Not compared by price: {', '.join(unpriced)}; give FLEET=P or --price P")
    lines += [f"{some['on']} is left out: {some['reason']}" for some in fleets if some["reason"]]
    headings = ("fleet", "layout", "transport", "kept", "step", "±", "tokens/s", "room", *_PRICES)
    rows = ({"fleet": fleet["on"]} | _cells(fleet["proposal"]) for fleet in fitting)
    table = [_table(headings, rows)] if fitting else []
    request = requests[0]
    answer = {name: of for name, of in _asked(request).items() if name in ("model", "dtype")}
    answer |= {"context": request.context, "sequences": request.sequences}
    answer |= {"fleets": fleets, **named, "assumptions": [*assumed]}
    return answer, [f"{_training(request)}\n", *table, "", *lines]


def longest(request: TrainingRequest) -> Answer:
    """Answers with the longest context."""
    degrees, training, memory, _ = layouts.max_context(request)
    context, most = training.context, memory.largest
    limited = f"memory, most of it {most}"
    if context + degrees.cp * layouts.UNIT > layouts.LONGEST:
        most, limited = "tokens", f"the length of a sequence, at most {layouts.LONGEST:,} tokens"
    assumed = request.assumptions(degrees, training)
    text = (
        f"{request.model.name} in {request.dtype} on {request.on} reaches {context:,} tokens "
        f"with {degrees}\nLimited by {limited}: {memory}, "
        f"total {units.memory(memory.total)}, "
        f"of the {units.memory(request.usable_bytes)} that can be used"
    )
    answer = {"max_context": context, "degrees": asdict(degrees), "limit": most}
    answer |= {"memory_bytes": memory.as_dict(), "assumptions": assumed}
    return {**_asked(request), **answer}, [text]


def _training(request: TrainingRequest) -> str:
    return (
        f"{request.model.name} ({request.model.parameters / 1e9:.3g} billion parameters), "
        f"{request.sequences} x {request.context:,} tokens a step in {request.dtype}"
    )


def _asked(request: TrainingRequest) -> dict[str, Any]:
    model, usable = request.model, request.usable_bytes
    return {
        "model": {**asdict(model), "parameters": model.parameters},
        "on": str(request.on),
        "fitted_trials": request.on.hardware.fitted,
        "links": request.on.linked or None,
        "price": request.on.hardware.price,
        "dtype": request.dtype,
        "usable_bytes": None if math.isinf(usable) else usable,
    }
