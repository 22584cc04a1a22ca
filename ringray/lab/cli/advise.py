"""``advise``: where and how to train with a long context. Imports neither torch nor ray."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from typing import Any

from ringray.base import units
from ringray.base.errors import UserError, unknown
from ringray.lab.cli.options import STORE, Option, Output, options, write
from ringray.lab.predict import advise as advice
from ringray.lab.predict import calibration, pooling
from ringray.lab.predict.advise import Proposal, TrainingRequest
from ringray.lab.predict.fitting import fitted, past_trials
from ringray.lab.predict.pooling import Pooled
from ringray.lab.predict.transformer import RankMemory
from ringray.lab.report import tables, words
from ringray.lab.specs import model as specs
from ringray.lab.specs import sections
from ringray.lab.specs.fields import Mismatch, tokens
from ringray.lab.trial import lengths
from ringray.models import sizes
from ringray_kernels.dtypes import DTYPES

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
_DEGREES = ("dp", "cp", "tp", "pp")
_TOP = 3  # proposals
_BATCH = 4 << 20  # tokens of a step, the paper's on TPUs


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def _length(text: str) -> int:
    try:
        return int(tokens(1, advice.LONGEST).read(int(text) if text.isdecimal() else text))
    except Mismatch as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {error}") from None


def _batch(text: str) -> tuple[int, bool]:
    """Returns the number, and whether it has a unit and so counts tokens."""
    return _length(text), not text.isdecimal()


@options(
    Option("model", metavar="MODEL", nargs="?", help="a name such as 8b or llama-13b, or sizes"),
    Option("--on", metavar="FLEET", required=True, help="h100:8x8 is 8 nodes of 8 ranks"),
    Option("--context", metavar="N", type=_length, help="tokens of a sequence: 128k, 1M"),
    Option("--max-context", action="store_true", help="find the longest that fits"),
    Option("--batch", metavar="N", type=_batch, help="tokens of a step, or sequences (4M)"),
    Option("--dtype", default="bfloat16", help="bf16 (default), fp16, fp32"),
    Option("--nics", metavar="N", type=_count, help="network ports of a node"),
    Option("--lengths", metavar="F", help="compare with one pool on documents of this table"),
    Option("--top", metavar="N", type=_count, help="proposals to show (3)"),
    STORE,
    Output("--json", metavar="F", help="write JSON to F; - is stdout"),
    Output("--spec", metavar="F", help="write the spec that measures the attention of the best"),
    *(Option(f"--{name}", metavar="N", type=_count, help="fix this degree") for name in _DEGREES),
    *(Option(f"--{name.replace('_', '-')}", metavar="N", type=_count) for name in _SIZES),
)
def advise(arguments: argparse.Namespace) -> int:
    """Prints the fastest ways to train a model, or the longest context that fits."""
    request = _request(arguments)
    if arguments.max_context:
        answer, shown = _longest(request)
    else:
        proposals = advice.advise(request, arguments.top or _TOP)
        answer, shown = _fastest(request, proposals)
        if arguments.lengths:
            pooled = pooling.pooled(request, proposals[0], lengths.read(arguments.lengths))
            answer["pool"] = pooled._asdict()
            shown.append(_pool(arguments.lengths, proposals[0], pooled))
        if arguments.spec:
            write("--spec", arguments.spec, spec(request, proposals[0]))
    if arguments.json:
        write("--json", arguments.json, json.dumps(answer, indent=1) + "\n")
    if arguments.json != "-":
        console = tables.console()
        for part in shown:
            if isinstance(part, str):
                console.print(part, soft_wrap=True)
            else:
                tables.show(part, console)
    return 0


def _request(arguments: argparse.Namespace) -> TrainingRequest:
    names = {**{name: name for name in DTYPES}, **sections.DTYPE_ALIASES}
    if arguments.dtype not in names:
        raise UserError(unknown("--dtype", arguments.dtype, names))
    dtype = names[arguments.dtype]
    model = sizes.named(arguments.model, {name: getattr(arguments, name) for name in _SIZES})
    on = calibration.fleet(arguments.on)
    if on.shares_cores and ":" not in arguments.on:
        raise UserError(f"--on: expected the number of ranks that share cores, as {on.name}:4")
    on = fitted(on, past_trials(arguments.store))
    if dtype not in on.hardware.peak:
        raise UserError(unknown(f"--dtype on {on.name}", dtype, on.hardware.peak))
    if arguments.nics:
        if on.per_node % arguments.nics:
            expected = f"expected a divisor of {on.per_node} ranks per node"
            raise UserError(f"--nics: got {arguments.nics}, {expected}")
        outer = on.hardware.outer.model_copy(update={"ranks": on.per_node // arguments.nics})
        on = replace(on, hardware=on.hardware.model_copy(update={"outer": outer}))
    if (arguments.context is None) != arguments.max_context:
        raise UserError("--context: expected the tokens of a sequence, or else --max-context")
    for name in ("batch", "top", "spec", "lengths"):
        if arguments.max_context and getattr(arguments, name) is not None:
            raise UserError(f"--{name}: expected beside --context, not --max-context")
    context = arguments.context or advice.LONGEST
    batch, has_unit = arguments.batch or (max(1, _BATCH // context), False)
    of_tokens = has_unit or batch >= context
    sequences, odd = divmod(batch, context) if of_tokens else (batch, 0)
    if odd:
        raise UserError(
            f"--batch: got {batch:,} tokens, expected a multiple of the context, {context:,} "
            "tokens, or a number of sequences"
        )
    fixed = {name: number for name in _DEGREES if (number := getattr(arguments, name))}
    return TrainingRequest(model, on, context, sequences, dtype, fixed)


def spec(request: TrainingRequest, best: Proposal) -> str:
    """Returns the spec that measures the attention of ``best`` on one of its rings.

    Raises:
        SpecError: specs have no ring of that size.
    """
    config, degrees, on = best.config, best.degrees, request.on
    problem, strategy, model = config.problem, config.strategy, request.model
    per_node = max(1, on.per_node // degrees.tp)
    nodes = min(on.nodes, -(-degrees.cp // per_node))
    name = f"{model.name}-{problem.seq_len}-cp{degrees.cp}".replace(" ", "-")
    text = (
        f"# Attention of {model.name} on one ring of {degrees} on {on}, as `ringray advise`\n"
        f"# proposes it. From a rank of the ring to the next are {degrees.tp} of a node.\n"
        f"version: 1\nname: {name[:64]}\nkind: latency\ncluster: '{on.name}:{nodes}x{per_node}'\n"
        f"ring: {{size: {degrees.cp}, device: {config.ring.device}}}\n"
        f"problem: {{seq_len: {problem.seq_len}, heads: {problem.heads}, "
        f"kv_heads: {problem.kv_heads}, head_dim: {problem.head_dim}, dtype: {problem.dtype}, "
        "direction: [forward, forward+backward]}\n"
        f"strategy: {{partition: {strategy.partition}, transport: '{strategy.transport}', "
        f"backward: {strategy.backward}}}\nmeasure: {{warmup: 2, baseline: null}}\n"
    )
    specs.parse(text, "--spec")
    return text


def _fastest(
    request: TrainingRequest, proposals: list[Proposal]
) -> tuple[dict[str, Any], list[Any]]:
    """Returns the answer as JSON, and as lines and a table."""
    rows = [_row(request, proposal) for proposal in proposals]
    alone, ring, best = advice.alone(request), advice.smallest_ring(request), proposals[0].time
    answer = _asked(request) | {"context": request.context, "sequences": request.sequences}
    answer |= {"one_rank_bytes": alone, "smallest_ring": _row(request, ring), "proposals": rows}
    enough = "enough" if alone <= request.usable_bytes else "not enough"
    if math.isinf(request.usable_bytes):
        enough = "perhaps"
    others = (proposal.time.total / best.total - 1 for proposal in proposals[1:])
    margins = ", ".join(f"{other:.1%}" for other in others)
    shares = {name: value / best.total for name, value in best.parts.items()}
    parts = (f"{name} {share:.1%}" for name, share in shares.items() if share >= 0.0005)
    before = (
        f"{request.model.name} ({request.model.parameters / 1e9:.3g} billion parameters), "
        f"{request.sequences} x {request.context:,} tokens a step "
        f"in {request.dtype} on {request.on}"
        f"{words.fitted(request.on.hardware)}\n{words.linked(request.on)}\n".replace("\n\n", "\n")
        + f"One rank: {enough}, a sequence takes {units.memory(alone)} of the "
        f"{_usable(request)} that can be used\n"
        f"Ring: {'needed; the smallest' if ring.degrees.cp > 1 else 'not needed; without one'}: "
        f"{ring.degrees} fits, in {ring.time.total / best.total:.2f} x the time of 1\n"
    )
    after = (
        f"\n1 is faster than the next by {margins or 'nothing, there is no other'}; "
        f"a time is good to ±{best.spread:.0%} (80%)\n"
        f"Time of 1: {', '.join(parts)}\nMemory of 1: {_parts(proposals[0].memory)}"
    )
    return answer, [before, _table(rows), after]


def _pool(file: str, best: Proposal, pooled: Pooled) -> str:
    """Writes how one pool of ranks compares with the rings of the best proposal."""
    degrees, strategy = best.degrees, best.config.strategy
    rings, pool = (units.digits(ms, " ms") for ms in (pooled.rings, pooled.pool))
    return (
        f"Packed documents of {file}: attention of a layer takes {rings} in rings of DP "
        f"{degrees.dp} x CP {degrees.cp} ({strategy.partition}, {strategy.transport}), {pool} in "
        f"one pool of {pooled.ranks} (balanced, {pooled.transport}): "
        f"{pooled.pool / pooled.rings:.2f} x the time"
    )


def _table(rows: list[dict[str, Any]]) -> Any:
    texts = ("transport", "partition", "walk back", "kept", "limited by")
    numbers = ("step", "tokens/s", "MFU", "paper's", "memory/rank")
    heads = ("#", *map(str.upper, _DEGREES), *texts[:4], *numbers, texts[4])
    table = tables.bare_table(*heads, texts=texts)
    for number, row in enumerate(rows, 1):
        strategy = [row[key] for key in ("transport", "partition", "backward", "kept")]
        paces = units.duration(row["step_s"]), units.digits(row["tokens_per_s"])
        shares = units.share(row["mfu"]), units.share(row["mfu_paper"])
        memory, degrees = units.memory(row["memory_bytes"]["total"]), row["degrees"].values()
        cells = [*strategy, *paces, *shares, memory, row["limit"]]
        table.add_row(str(number), *map(str, degrees), *cells)
    return table


def _row(request: TrainingRequest, proposal: Proposal) -> dict[str, Any]:
    seconds, config, price = proposal.time.total, proposal.config, request.on.hardware.price
    tokens_s = request.sequences * request.context / seconds
    hours = request.on.ranks / 3600 / tokens_s * 1e6  # of ranks, for a million tokens
    return {
        "degrees": asdict(proposal.degrees), "transport": config.strategy.transport,
        "partition": config.strategy.partition, "backward": config.strategy.backward,
        "kept": proposal.training.kept, "mlp_rows": proposal.training.mlp_rows, "step_s": seconds,
        "spread": proposal.time.spread, "parts_s": proposal.time.parts, "tokens_per_s": tokens_s,
        "mfu": proposal.mfu(request, request.model.forward_flops(request.context)),
        "mfu_paper": proposal.mfu(request, request.model.paper_flops(request.context)),
        "memory_bytes": proposal.memory.as_dict(), "limit": proposal.limit(request.on),
        "rank_hours_per_million_tokens": hours,
        "price_per_million_tokens": price and hours * price,
    }  # fmt: skip


def _longest(request: TrainingRequest) -> tuple[dict[str, Any], list[Any]]:
    """Returns the longest context as JSON, and as lines."""
    limit = advice.max_context(request)
    most = max(vars(limit.memory), key=vars(limit.memory).__getitem__)
    limited = f"memory, most of it {most}"
    if limit.longest:
        most, limited = "tokens", f"the length of a sequence, at most {advice.LONGEST:,} tokens"
    text = (
        f"{request.model.name} in {request.dtype} on {request.on} reaches {limit.context:,} tokens "
        f"with {limit.degrees}\nLimited by {limited}: {_parts(limit.memory)}, "
        f"of the {_usable(request)} that can be used"
    )
    answer = {"max_context": limit.context, "degrees": asdict(limit.degrees), "limit": most}
    return {**_asked(request), **answer, "memory_bytes": limit.memory.as_dict()}, [text]


def _asked(request: TrainingRequest) -> dict[str, Any]:
    model = {**asdict(request.model), "parameters": request.model.parameters}
    usable = None if math.isinf(request.usable_bytes) else request.usable_bytes
    on = {"fitted_trials": request.on.hardware.fitted, "links": request.on.linked or None}
    return {
        "model": model,
        "on": str(request.on),
        **on,
        "dtype": request.dtype,
        "usable_bytes": usable,
    }


def _usable(request: TrainingRequest) -> str:
    return (
        "unknown amount" if math.isinf(request.usable_bytes) else units.memory(request.usable_bytes)
    )


def _parts(memory: RankMemory) -> str:
    return ", ".join(f"{name} {units.memory(held)}" for name, held in memory.as_dict().items())
