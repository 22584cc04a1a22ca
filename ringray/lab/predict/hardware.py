"""Hardware: what a rank computes, holds and sends; and fleets of it, written as ``h100:512x8``.

The table is data (``hardware.yaml``). An entry that ``ringray calibrate`` has measured, and a
user's own file, have the same format. Everything is in SI units: FLOP/s, bytes, seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from ringray.base import private_files
from ringray.base.errors import UserError, reason_of, unknown
from ringray.lab.predict import measured
from ringray_kernels.dtypes import DTYPES

TABLE = Path(__file__).with_name("hardware.yaml")
LOCAL = "local"  # this machine
RANKS = 1 << 16  # of a fleet
_OVER = 1e3  # times the peak, beyond which a rate is in other units
_SLOWEST = 1e6  # FLOP/s, below which a rate is in other units


def _measured_in(unit: str, least: float, most: float) -> AfterValidator:
    """Returns the check of numbers that are in another unit where they are outside of bounds."""

    def check(value: float) -> float:
        if not least <= value <= most:
            raise ValueError(f"got {value:g}, expected {least:g} to {most:g} {unit}")
        return value

    return AfterValidator(check)


# Bounds beyond any hardware, within which no prediction overflows.
Positive = Annotated[float, Field(ge=1e-9, le=1e9)]
Rate = Annotated[float, Field(ge=1e-6, le=1e30)]  # bytes or FLOP a second, or a factor of it
Bytes = Annotated[float, _measured_in("bytes", 1e8, 1e30)]
Bandwidth = Annotated[float, _measured_in("bytes/s", 1e6, 1e30)]
Flops = Annotated[float, _measured_in("FLOP/s", _SLOWEST, 1e30)]
Latency = Annotated[float, _measured_in("seconds", 0, 1)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Share = Annotated[float, Field(ge=1e-6, le=1)]
Spread = Annotated[float, Field(ge=0, le=2)]
Count = Annotated[int, Field(ge=1, le=RANKS)]
Rows = Annotated[int, Field(ge=1)]
Direction = Literal["forward", "backward"]
Dtype = Annotated[str, Field(pattern=f"^({'|'.join([*DTYPES, 'float8'])})$")]


class FrozenModel(BaseModel):
    """Fields that do not change; others than these are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(FrozenModel):
    """One port of messages. ``bandwidth``: bytes/s, one way, both at once. ``latency``: seconds of
    a message beside its bytes. ``ranks``: those that share the port."""

    bandwidth: Bandwidth
    latency: Latency
    ranks: Count = 1


class Curve(FrozenModel):
    """Rates of one attention call, whose queries and keys have as many rows.

    ``stepped``: each second row sees two keys more, as between ranks of folded partitions.
    ``rates``: FLOP/s by rows, of visible pairs: 4 x head dim a pair forward, 10 x backward; of an
    entry with ``tables``, over those of the measured forward call.
    ``doubt``: relative spread beside the entry's.
    """

    dtype: Dtype
    head_dim: Count
    direction: Direction
    causal: bool
    stepped: bool = False
    rates: Annotated[Mapping[Rows, Rate], Field(min_length=1)]
    doubt: Spread = 0.0


class Hardware(FrozenModel):
    """One kind of rank, with its links.

    ``peak``: FLOP/s of dense products by dtype. ``products``: the share of it that large products
    reach. ``tables``, ``collectives``: the system of ``measured`` that has this one's attention
    calls and products, and its collectives within a node; None: rates and links say it. ``call``:
    seconds of an attention call beside its products. ``spread``: relative half width of the 80%
    interval of a call's time. ``price``: of a rank and hour. ``host``: bytes/s of copies between a
    rank and its host's memory (of a CPU rank: files), one way; ``host_memory``: bytes of a node's.
    ``cores``: of a machine whose ranks have no device of their own, else None; the fields after it
    are measured there. ``shared``: rate of a rank while all cores are busy over its rate alone.
    ``threads``: rate with so many threads over that with one. ``message``, ``copying``:
    core-seconds of its two ends that a message takes, and each of its bytes. ``step``, ``op``:
    seconds of each step, and of each pass of the op. ``merged``: the curves of calls that are not
    causal contain the merge into the running state. ``tiles``: cores multiply bf16 by tiles (AMX),
    for which PyTorch copies K and V in each call; ``packs``: by AVX-512, for which it packs the
    operands of a backward call. ``fitted``: trials of a store that corrected it.
    """

    title: str
    memory: Bytes | None = None
    memory_bandwidth: Bandwidth
    peak: Annotated[Mapping[Dtype, Flops], Field(min_length=1)]
    ranks_per_node: Count
    inner: Link
    outer: Link
    products: Share
    attention: Annotated[tuple[Curve, ...], Field(min_length=1)]
    tables: str | None = None
    collectives: str | None = None
    call: Seconds = 0.0
    spread: Spread = 0.1
    price: Positive | None = None
    host: Bandwidth = 24.0e9  # PCIe 4 x16
    host_memory: Bytes | None = None
    sources: tuple[str, ...] = ()
    cores: Count | None = None
    shared: Share = 1.0
    threads: Mapping[int, Positive] = {}
    message: Seconds = 0.0
    copying: Seconds = 0.0
    step: Seconds = 0.0
    op: Seconds = 0.0
    merged: bool = False
    tiles: bool = False
    packs: bool = True
    versions: Mapping[str, str] = {}
    measured: str | None = None
    fitted: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        for curve in self.attention:
            if max(curve.rates.values()) > _OVER * self.peak.get(curve.dtype, math.inf):
                raise ValueError(f"attention in {curve.dtype} far beyond the peak; both are FLOP/s")
            # Beside tables the rates are factors of what was measured.
            if self.tables is None and (least := min(curve.rates.values())) < _SLOWEST:
                rate = f"a rate of attention in {curve.dtype}: got {least:g}"
                raise ValueError(f"{rate}, expected FLOP/s, at least {_SLOWEST:g}")
        for name in filter(None, (self.tables, self.collectives)):
            if name not in measured.systems():
                raise ValueError(unknown("measured system", name, measured.systems()))
        return self

    def __hash__(self) -> int:
        """Returns the object's own: curves are found once for each."""
        return id(self)


@dataclass(frozen=True)
class Noise:
    """Differences between ranks. ``jitter``: relative standard deviation of each step's
    computation, drawn by ``seed``. ``slow``: factors of the computation of single ranks."""

    jitter: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Fleet:
    """``nodes`` machines of ``per_node`` ranks each. ``stride``: ranks of a machine from one rank
    of a ring to its next, where a ring takes a part of each node. ``rings``: of those ranks, that
    compute on each node at a time. ``noise``: None if all ranks are
    equal. ``order``: the places of ranks that do not follow the nodes. ``linked``: when and where
    the links between nodes were measured, empty if not."""

    name: str
    hardware: Hardware
    nodes: int
    per_node: int
    stride: int = 1
    rings: int = 1
    noise: Noise | None = None
    order: tuple[int, ...] | None = None
    linked: str = ""

    @property
    def ranks(self) -> int:
        """Returns the ranks of all nodes."""
        return self.nodes * self.per_node

    def place(self, rank: int) -> int:
        """Returns the place of a rank of a ring among those of all nodes."""
        return rank * self.stride if self.order is None else self.order[rank * self.stride]

    def node(self, rank: int) -> int:
        """Returns the node of a rank of a ring."""
        return self.place(rank) // self.per_node

    @property
    def shares_cores(self) -> bool:
        """Tells whether ranks of a node compute on the same cores."""
        return self.hardware.cores is not None

    def __str__(self) -> str:
        if self.per_node == RANKS:  # no number was given
            return self.name
        size = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{self.name}:{size}{self.per_node}"


def cpu(cores: int, *, tiles: bool = False, packs: bool = True) -> Fleet:
    """Returns one machine whose ranks share ``cores``, which multiply as ``Hardware`` says, at
    rates of the table."""
    unmeasured = {"cores": cores, "ranks_per_node": RANKS, "tiles": tiles, "packs": packs}
    return Fleet(LOCAL, table()["cpu"].model_copy(update=unmeasured), 1, RANKS)


def gpus(model: str = "") -> Fleet:
    """Returns as many nodes as any ring needs of the GPU whose ``model`` contains its name in the
    table, such as ``NVIDIA H200``; of the H100 if there is none."""
    name = next((name for name in table() if names(model, name)), "h100")
    hardware = table()[name]
    return Fleet(name, hardware, RANKS // hardware.ranks_per_node, hardware.ranks_per_node)


def names(model: str, entry: str) -> bool:
    """Tells whether the name of a GPU contains that of an entry."""
    return entry in re.split(r"[^a-z0-9]+", model.lower())


def interpreter(on: Fleet) -> Fleet:
    """Returns ``on`` with the rate of Triton's interpreter: 15 to 65 MFLOP/s on one core of an AMD
    EPYC for head dims 16 to 128, in all types."""
    slow = [
        Curve(dtype="float32", head_dim=64, direction=way, causal=False, rates={1: 40e6})
        for way in ("forward", "backward")
    ]
    interpreted = {"attention": tuple(slow), "peak": {"float32": 40e6}}
    return replace(on, hardware=on.hardware.model_copy(update=interpreted))


@cache
def table() -> dict[str, Hardware]:
    """Returns all entries of the table by name."""
    return read_entries(TABLE)


def read_entries(path: Path) -> dict[str, Hardware]:
    """Reads a file of entries; raises UserError that names the fields that are wrong."""
    try:
        with private_files.regular(path) as file:
            text = file.read()
        content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(reason_of(error).split())
        raise UserError(f"hardware: {path} cannot be read: {why}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"hardware: {path} holds no entries, expected NAME: {{title: ...}}")
    return {str(name): entry(fields, str(path), name) for name, fields in content.items()}


def entry(fields: Any, where: str, *around: Any) -> Hardware:
    """Returns the entry of ``fields``. ``around``: the keys under which a file has it, if any.

    Raises:
        UserError: names ``where`` and each field that is wrong.
    """
    try:
        return Hardware.model_validate(fields)
    except ValidationError as error:
        lines = []
        for mistake in error.errors():
            field = ".".join(map(str, (*around, *mistake["loc"])))
            lines.append(f"{where}: {field}: {_explained(mistake)}")
        raise UserError("\n".join(lines)) from None


def _explained(error: ErrorDetails) -> str:
    """Returns what was read, what is expected, and the nearest name."""
    *around, last = error["loc"] or ("",)
    if error["type"] in ("extra_forbidden", "string_pattern_mismatch"):
        sections: dict[Any, type[BaseModel]] = {"inner": Link, "outer": Link, "attention": Curve}
        section = sections.get((*around, "")[0], Hardware)
        dtype = error["type"] == "string_pattern_mismatch"
        names = [*DTYPES, "float8"] if dtype else [*section.model_fields]
        return unknown("dtype" if dtype else "field", error["input"] if dtype else last, names)
    if error["type"] == "missing":
        return "missing, expected a value"
    expected = error["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
    return expected if error["type"] == "value_error" else f"got {error['input']!r:.60}, {expected}"


def parse_fleet(text: str, local: Hardware | None = None) -> Fleet:
    """Reads ``HARDWARE``, ``HARDWARE:RANKS`` of one node, or ``HARDWARE:NODESxRANKS``.

    ``HARDWARE``: a name of the table, ``local`` for the given entry, or a path of a file with one
    entry. Without a number it is one node, of any number of ranks where they share cores.

    Raises:
        UserError: unknown hardware, or numbers that are none.
    """
    name, colon, size = text.partition(":")
    hardware = _named(name, local)
    if not colon:
        return Fleet(name, hardware, 1, RANKS if hardware.cores else hardware.ranks_per_node)
    numbers = re.fullmatch(r"(?:([1-9][0-9]{0,4})x)?([1-9][0-9]{0,4})", size)
    if not numbers:
        raise UserError(f"got {text!r}, expected {name}:RANKS of one node or {name}:NODESxRANKS")
    nodes, per_node = int(numbers[1] or 1), int(numbers[2])
    if nodes * per_node > RANKS:
        raise UserError(f"got {nodes * per_node:,} ranks, expected at most {RANKS:,}")
    if per_node > hardware.ranks_per_node and hardware.cores is None:
        raise UserError(
            f"got {per_node} ranks per node, but a node of {name} has at most "
            f"{hardware.ranks_per_node}; write {name}:NODESxRANKS"
        )
    return Fleet(name, hardware, nodes, per_node)


def _named(name: str, local: Hardware | None) -> Hardware:
    if name == LOCAL:
        if local is None:
            raise UserError("local is not measured on this machine; run `ringray calibrate`")
        return local
    if name in table():
        return table()[name]
    if name.lower().endswith((".yaml", ".yml", ".json")):
        entries = read_entries(Path(name))
        if len(entries) > 1:
            raise UserError(f"{name} holds {len(entries)} entries, expected one")
        return next(iter(entries.values()))
    raise UserError(unknown("hardware", name, (*table(), LOCAL)))
