"""``advise``: where and how to train with a long context. Imports neither torch nor ray."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

from ringray.base.errors import UserError, unknown
from ringray.lab.cli import proposals
from ringray.lab.cli.options import STORE, Option, Output, options, write
from ringray.lab.cli.proposals import DEGREES
from ringray.lab.predict import advise as advice
from ringray.lab.predict import calibration, layouts, pooling
from ringray.lab.predict.advise import Proposal
from ringray.lab.predict.fitting import fitted, past_trials
from ringray.lab.predict.hardware import Fleet
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.report import tables
from ringray.lab.specs import model as specs
from ringray.lab.specs import sections
from ringray.lab.specs.fields import PRICE, one_of, tokens, whole
from ringray.lab.trial import lengths
from ringray.models import sizes
from ringray_kernels.dtypes import DTYPES

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
_TOP = 3  # proposals
_BATCH = 4 << 20  # tokens of a step, the paper's on TPUs
# An option, and others that go beside another one instead.
_EXCLUDES = (
    ("compare", "on", ("max_context", "nics", "lengths", "top", "spec")),
    ("max_context", "context", ("batch", "top", "spec", "lengths")),
)


_count = whole(1, 1 << 24).argument
_length = tokens(1, layouts.LONGEST).argument
_dtype = one_of(DTYPES, sections.DTYPE_ALIASES).argument


def _batch(text: str) -> tuple[int, bool]:
    """Returns the number, and whether it has a unit and so counts tokens."""
    return _length(text), not text.isdecimal()


def _priced(text: str) -> tuple[str, float | None]:
    """Reads a fleet, and after it a price or none."""
    fleet, equals, price = text.rpartition("=")
    return (fleet, PRICE.argument(price)) if equals else (text, None)


@options(
    Option("model", metavar="MODEL", nargs="?", help="a name such as 8b, a config.json, or sizes"),
    Option("--on", metavar="FLEET", help="h100:8x8 is 8 nodes of 8 ranks"),
    Option(
        "--compare", metavar="FLEET[=P]", nargs="+", type=_priced, help="compare these, at prices"
    ),
    Option(
        "--price",
        metavar="P",
        type=PRICE.argument,
        help="of a rank and hour (default: the entry's)",
    ),
    Option("--context", metavar="N", type=_length, help="tokens of a sequence: 128k, 1M"),
    Option("--max-context", action="store_true", help="find the longest that fits"),
    Option("--batch", metavar="N", type=_batch, help="tokens of a step, or sequences (4M)"),
    Option("--dtype", type=_dtype, default="bfloat16", help="bf16 (default), fp16, fp32"),
    Option("--nics", metavar="N", type=_count, help="network ports of a node"),
    Option("--lengths", metavar="F", help="compare with one pool on documents of this table"),
    Option("--top", metavar="N", type=_count, help="proposals to show (3)"),
    STORE,
    Output("--json", metavar="F", help="write JSON to F; - is stdout"),
    Output("--spec", metavar="F", help="write the spec that measures the attention of the best"),
    *(Option(f"--{name}", metavar="N", type=_count, help="fix this degree") for name in DEGREES),
    *(Option(f"--{name.replace('_', '-')}", metavar="N", type=_count) for name in _SIZES),
)
def advise(arguments: argparse.Namespace) -> int:
    """Prints the fastest ways to train a model, or the longest context that fits."""
    request, *others = _requests(arguments)
    pool: list[str] = []
    if arguments.compare:
        answer, shown = proposals.compared([request, *others])
    elif arguments.max_context:
        answer, shown = proposals.longest(request)
    else:
        ranked = advice.advise(request, arguments.top or _TOP)
        answer, shown = proposals.fastest(request, ranked)
        if arguments.lengths is not None:
            pooled = pooling.pooled(request, ranked[0], lengths.read(arguments.lengths))
            answer["pool"] = pooled._asdict()
            pool = [proposals.of_pool(arguments.lengths, ranked[0], pooled)]
        if arguments.spec:
            write("--spec", arguments.spec, spec(request, ranked[0]))
    if arguments.json:
        write("--json", arguments.json, json.dumps(answer, indent=1) + "\n")
    if arguments.json != "-":
        console = tables.console()
        for part in (*shown, *(f"Assumed: {line}" for line in answer["assumptions"]), *pool):
            if isinstance(part, str):
                console.print(part, soft_wrap=True)
            else:
                tables.show(part, console)
    return 0


def _requests(arguments: argparse.Namespace) -> list[TrainingRequest]:
    """Returns the same training on each of the fleets, one where none are compared."""
    if (arguments.on is None) == (arguments.compare is None):
        raise UserError("--on: expected a fleet, --on h100:8x8, or --compare with several")
    for option, instead, names in _EXCLUDES:
        for name in names:
            if getattr(arguments, option) and getattr(arguments, name) not in (None, False):
                flags = (f"--{some.replace('_', '-')}" for some in (name, instead, option))
                raise UserError("{}: expected beside {}, not {}".format(*flags))
    if (arguments.context is None) != arguments.max_context:
        raise UserError("--context: expected the tokens of a sequence, or --max-context, not both")
    model = sizes.named(arguments.model, {name: getattr(arguments, name) for name in _SIZES})
    context = arguments.context or layouts.LONGEST
    batch, has_unit = arguments.batch or (max(1, _BATCH // context) * context, True)
    of_tokens = has_unit or batch >= context
    sequences, odd = divmod(batch, context) if of_tokens else (batch, 0)
    if odd:
        raise UserError(
            f"--batch: got {batch:,} tokens, expected a multiple of the context, {context:,} "
            "tokens, or a number of sequences"
        )
    fixed = {name: number for name in DEGREES if (number := getattr(arguments, name))}
    fleets = [
        _fleet(arguments, text, price or arguments.price)
        for text, price in arguments.compare or [(arguments.on, None)]
    ]
    # A fleet is named by its text in tables and JSON, which would not tell two of them apart.
    for name, times in Counter(map(str, fleets)).items():
        if times > 1:
            raise UserError(f"--compare: got {name} {times} times, expected each fleet once")
    dtype = arguments.dtype
    return [TrainingRequest(model, on, context, sequences, dtype, fixed) for on in fleets]


def _fleet(arguments: argparse.Namespace, text: str, price: float | None) -> Fleet:
    """Returns a fleet, fitted to the trials of the store, with its ports and price."""
    on = calibration.fleet(text)
    if on.shares_cores and ":" not in text:
        raise UserError(f"got {text!r}, expected the ranks that share cores, too, as {on.name}:4")
    on = fitted(on, past_trials(arguments.store))
    if arguments.dtype not in on.hardware.peak:
        raise UserError(unknown(f"--dtype on {on.name}", arguments.dtype, on.hardware.peak))
    changed: dict[str, Any] = {"price": price} if price else {}
    if nics := arguments.nics:
        if on.per_node % nics:
            expected = f"expected a divisor of {on.per_node} ranks per node"
            raise UserError(f"--nics: got {nics}, {expected}")
        ranks = on.per_node // nics
        changed["outer"] = on.hardware.outer.model_copy(update={"ranks": ranks})
    return replace(on, hardware=on.hardware.model_copy(update=changed))


def spec(request: TrainingRequest, best: Proposal) -> str:
    """Returns the spec that measures the attention of ``best`` on one of its rings.

    Raises:
        SpecError: specs have no ring of that size.
    """
    config, degrees, on = best.config, best.degrees, request.on
    problem, strategy, model = config.problem, config.strategy, request.model
    per_node = max(1, on.per_node // degrees.tp)
    nodes = min(on.nodes, -(-degrees.cp // per_node))
    title = " ".join(model.name.split())  # of a folder's name
    name = re.sub(r"[^\w.-]+", "-", f"{title}-{problem.seq_len}-cp{degrees.cp}", flags=re.ASCII)
    others = ("value_head_dim", "window", "chunk")
    seen = "".join(f"{of}: {n}, " for of in others if (n := getattr(problem, of)) is not None)
    text = (
        f"# Attention of {title} on one ring of {degrees} on {on}, as `ringray advise`\n"
        f"# proposes it. From a rank of the ring to the next are {degrees.tp} of a node.\n"
        f"version: 1\nname: {name.lstrip('-._')[:64]}\nkind: latency\n"
        f"cluster: '{on.name}:{nodes}x{per_node}'\n"
        f"ring: {{size: {degrees.cp}, device: {config.ring.device}}}\n"
        f"problem: {{seq_len: {problem.seq_len}, heads: {problem.heads}, "
        f"kv_heads: {problem.kv_heads}, head_dim: {problem.head_dim}, {seen}"
        f"dtype: {problem.dtype}, direction: [forward, forward+backward]}}\n"
        f"strategy: {{partition: {strategy.partition}, transport: '{strategy.transport}', "
        f"backward: {strategy.backward}}}\nmeasure: {{warmup: 2, baseline: null}}\n"
    )
    specs.parse(text, "--spec")
    return text
