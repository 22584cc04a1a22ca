"""A calibration: ranks of this machine measure, and their samples become an entry of hardware.

The ranks are processes of their own; this one needs no torch, and writes nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray import transport as transports
from ringray.base import provenance, units
from ringray.base.errors import UserError
from ringray.lab.predict import cost_model
from ringray.lab.predict.calibration import Device
from ringray.lab.predict.hardware import LOCAL, RANKS, Fleet, Hardware, Link, entry, table
from ringray.lab.trial.config import TrialConfig

Samples = dict[str, Any]
Floats = NDArray[np.float64]

_DIRECTIONS = ("forward", "backward")
_SHAPES = ("causal", "full", "stepped")
_MANY = 8  # heads of a call with masks, which they share
_LARGE = 64  # part of the largest message from which on bytes take most of the time


class TimedCall(NamedTuple):
    """One call of attention."""

    dtype: str
    head_dim: int
    direction: str
    #: Of the visible keys: ``causal`` for the own chunk; ``full`` and ``stepped`` for others, which
    #: are merged into the state of their rows.
    shape: str
    rows: int
    heads: int
    threads: int = 1

    @property
    def kind(self) -> tuple[str, int, str, str]:
        """Returns the fields that calls of one curve have in common."""
        return self[:4]


@dataclass(frozen=True)
class Size:
    """The extent of a calibration."""

    rows: tuple[int, ...]  # of calls
    head_rows: int  # rows of all heads of a call together; at most ``heads`` heads
    heads: int
    hops: tuple[int, ...]  # bytes that a rank sends at once
    rings: tuple[tuple[str, int, int], ...]  # type, rows of a rank, heads; first a tiny one
    seconds: float  # of the longest part, to which the others are in proportion
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    head_dims: tuple[int, ...] = (64, 128)
    stepped: int = 2048  # most rows of calls with masks
    slow: Mapping[str, int] = field(default_factory=dict)  # most rows of a type

    def cases(self) -> Iterator[TimedCall]:
        """Yields the calls of all curves; those of the same tensors follow each other."""
        for dtype, dim, rows in product(self.dtypes, self.head_dims, self.rows):
            if rows <= self.slow.get(dtype, rows):
                heads = min(self.heads, max(1, self.head_rows // rows))
                for way, shape in product(_DIRECTIONS, _SHAPES[:2]):
                    yield TimedCall(dtype, dim, way, shape, rows, heads)
                if rows <= self.stepped:
                    many = max(heads, _MANY)
                    for way in _DIRECTIONS:
                        yield TimedCall(dtype, dim, way, _SHAPES[2], rows, many)

    def beside(self) -> list[TimedCall]:
        """Returns the calls that are timed on ranks side by side: of many rows, in one pass."""
        kind = ("forward", "full", self.rows[-3])
        return [case for case in self.cases() if (case.direction, case.shape, case.rows) == kind]

    def single(self) -> list[TimedCall]:
        """Returns the shortest calls, of one head."""
        kind = self.dtypes[0], self.head_dims[0]
        return [TimedCall(*kind, way, "full", self.rows[0], heads=1) for way in _DIRECTIONS]

    def alone(self) -> list[TimedCall]:
        """Returns all calls of a rank alone."""
        return [*self.cases(), *self.single(), self.threaded(1), self.threaded(2)]

    def threaded(self, threads: int) -> TimedCall:
        """Returns a call of two heads by some threads."""
        kind = self.dtypes[0], self.head_dims[0]
        return TimedCall(*kind, "forward", "full", self.rows[-3], heads=2, threads=threads)


_TINY = ("float32", 16, 8)
_CPU_ROWS = (128, 184, 192, 256, 512, 760, 768, 1024, 2048, 4096, 8192)
_CPU_RINGS = (_TINY, ("float32", 128, 64), ("bfloat16", 320, 8), ("float32", 512, 16))
_CPU_HOPS, _GPU_HOPS = (tuple(1 << i for i in range(n, n + 17, 2)) for n in (10, 12))
_GPU_ROWS = tuple(512 << i for i in range(6))
SIZES = {
    "cpu": Size(_CPU_ROWS, 2048, 16, _CPU_HOPS, _CPU_RINGS, 45.0, slow={"float16": 1024}),
    "cuda": Size(_GPU_ROWS, 1 << 17, 32, _GPU_HOPS, (_TINY,), 20.0),
}


def measure(device: Device, say: Callable[[str], None], size: Size | None = None) -> Samples:
    """Returns the fields of an entry of hardware. ``say``: takes a line of progress.

    Raises:
        UserError: there is no such device, or a rank has failed.
    """
    size, machine = size or SIZES[device], provenance.hardware()
    ports = machine["cores"] if device == "cpu" else len(machine["gpus"])
    if not ports:
        raise UserError(f"--device: got {device}, but no GPU of this machine works")
    alone, samples = size.alone(), dict[int, Samples]()
    for ranks, parts in sorted(_parts(device, ports, size.seconds).items()):
        say(f"{units.plural(ranks, 'rank')}: {', '.join(parts)}, {sum(parts.values()):.0f} s")
        rings_of_ranks = [config.as_dict() for config in _rings(size, ranks)]
        cases = alone if ranks == 1 else size.beside()
        asked = {"parts": parts, "ranks": ranks, "device": device, "sizes": size.hops}
        samples[ranks] = _samples(asked | {"cases": cases, "rings": rings_of_ranks})
    cpu = f"{machine['cpu']}, {units.plural(machine['cores'], 'core')}"
    fields = {
        "title": machine["gpus"][0] if device == "cuda" else cpu,
        "memory": samples[1]["products"].get("memory", [float(machine["memory_bytes"])])[0],
        "ranks_per_node": ports,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "sources": ["measured by `ringray calibrate`"],
    }
    if device == "cuda":
        return fields | _of_rank(size, samples, cores=False)
    fields |= _of_rank(size, samples, cores=True) | _of_cores(size, samples, ports)
    fields["host"] = table()["cpu"].host  # not measured
    crowd = _crowd(ports)
    cores = np.median(samples[crowd]["rings"]["cores"], 0)
    return fields | _handling(fields, _rings(size, crowd), cores)


def _parts(device: Device, ports: int, seconds: float) -> dict[int, dict[str, float]]:
    """Returns what the ranks of rings of several sizes time, and for how long; ``ports``: cores or
    GPUs."""
    parts = {1: {"attention": seconds, "products": seconds / 10, "rings": seconds / 30}}
    if device == "cpu" or ports > 1:
        parts[2] = {"hops": seconds / 6}
    if device == "cpu":
        parts.setdefault(_crowd(ports), {})["rings"] = seconds / 4
        if ports > 1:
            parts.setdefault(ports, {})["shared"] = seconds / 6
    return parts


def _crowd(cores: int) -> int:
    """Returns the ranks of a ring that shows what messages and steps cost ranks that share
    cores."""
    return 2 * min(cores, 4)


def _rings(size: Size, ranks: int) -> list[TrialConfig]:
    """Returns the rings that are timed: one of next to nothing by each transport, and larger ones
    by the first."""

    def ring(transport: str, dtype: str, rows: int, heads: int) -> TrialConfig:
        shape = {"seq_len": rows * ranks, "heads": heads, "kv_heads": heads}
        kind = {"dtype": dtype, "head_dim": size.head_dims[0], "transport": transport}
        auto = {"backward": "auto", "device": "auto"}
        return cost_model.causal_pass(ring_size=ranks, **shape, **kind, **auto)

    tiny, *larger = size.rings
    if ranks == 1:
        return [ring(transports.DEFAULT, *tiny)]
    tried = transports.searched(ranks, tiny[2], tiny[2])
    return [ring(name, *tiny) for name in tried] + [ring(transports.DEFAULT, *x) for x in larger]


def _samples(asked: Samples) -> Samples:
    """Returns what rank 0 of a ring of new processes prints; ends all of them in any case."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ringray-"))
        started = []
        for rank in range(asked["ranks"]):
            mine = json.dumps(asked | {"rank": rank, "store": f"{folder}/ranks"})
            words = [sys.executable, "-P", "-m", "ringray.lab.calibrate.rank", mine]
            out, err = Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")
            with out.open("wb") as to, err.open("wb") as log:
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=to, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append((process, out, err))
        for process, _, err in started:
            if process.wait():
                last = err.read_text(errors="replace").strip().splitlines()[-1:]
                raise UserError(f"a rank could not measure: {''.join(last) or process.returncode}")
        samples: Samples = json.loads(started[0][1].read_text())
        return samples


def _of_rank(size: Size, samples: Mapping[int, Samples], *, cores: bool) -> Samples:
    """Returns the fields of any hardware. ``cores``: those of the ranks copy the messages; a link
    takes what that leaves of a hop's time."""
    alone = samples[1]
    seconds = dict(zip(size.alone(), alone["attention"], strict=True))
    call = float(np.mean([_call(case, size, seconds) for case in size.single()]))
    peak = {name: max(alone["products"][name]) for name in size.dtypes}
    tenths = (np.quantile(seconds[case], (0.1, 0.5, 0.9)) for case in size.cases())
    spreads = [(high - low) / 2 / middle for low, middle, high in tenths]
    copied = float(np.median(alone["products"]["copy"]))
    link = Link(bandwidth=copied, latency=0.0)
    if 2 in samples:
        latency, byte = line(size.hops, samples[2]["hops"]["clock"])
        copying = line(size.hops, samples[2]["hops"]["cores"])[1] if cores else 0.0
        link = Link(bandwidth=1 / max(byte - copying, 1 / copied), latency=latency)
    return {
        "memory_bandwidth": copied,
        "peak": peak,
        "products": min(float(np.median(alone["products"][name])) / peak[name] for name in peak),
        "inner": link.model_dump(),
        "outer": link.model_dump(),
        "attention": _curves(size, seconds, call),
        "call": call,
        "spread": float(np.median(spreads)),
        "op": float(np.median(alone["rings"]["clock"])) / 2,
    }


def _call(single: TimedCall, size: Size, seconds: Mapping[TimedCall, list[float]]) -> float:
    """Returns the seconds of a call beside its heads, from the same with many heads."""
    same = single.kind, single.rows
    (case,) = (case for case in size.cases() if (case.kind, case.rows) == same)
    of_one, of_all, heads = np.median(seconds[single]), np.median(seconds[case]), case.heads
    return max(0.0, float(heads * of_one - of_all) / (heads - 1)) if heads > 1 else 0.0


def _curves(size: Size, seconds: Mapping[TimedCall, list[float]], call: float) -> list[Samples]:
    rates: dict[tuple[Any, ...], dict[int, float]] = {}
    for case in size.cases():
        usual = float(np.median(seconds[case]))
        rates.setdefault(case.kind, {})[case.rows] = _flops(case) / max(usual - call, usual / 2)
    curves = []
    for (dtype, dim, way, shape), by_rows in rates.items():
        visible = {"causal": shape == "causal", "stepped": shape == "stepped"}
        kind = {"dtype": dtype, "head_dim": dim, "direction": way}
        curves.append({**kind, **visible, "rates": by_rows})
    return curves


def _flops(case: TimedCall) -> float:
    """Returns the FLOPs of the visible pairs of a call."""
    rows = case.rows
    pairs = {"causal": rows * (rows + 1) // 2, "full": rows * rows, "stepped": rows * rows // 2}
    per_pair = 4.0 if case.direction == "forward" else 10.0
    return pairs[case.shape] * case.heads * case.head_dim * per_pair


def line(sizes: Sequence[int], rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns the seconds of a hop beside its bytes, and those of a byte of large ones."""
    middle, size = np.median(rounds, 0), np.array(sizes)
    large = size >= max(size[-1] / _LARGE, size[1])
    return float(middle[0]), float(max(np.median((middle - middle[0])[large] / size[large]), 1e-15))


def _of_cores(size: Size, samples: Mapping[int, Samples], cores: int) -> Samples:
    """Returns the fields of ranks that share cores."""
    seconds = dict(zip(size.alone(), samples[1]["attention"], strict=True))
    of_one, of_two = (float(np.median(seconds[size.threaded(n)])) for n in (1, 2))
    beside = samples[cores].get("shared", {"alone": [[1.0]], "busy": [[1.0]]})
    slower = np.median(beside["busy"], 0) / np.median(beside["alone"], 0)
    return {
        "cores": cores,
        "shared": min(1.0, 1 / float(np.median(slower))),
        "threads": {2: of_one / of_two} if cores > 1 else {},
        "merged": True,
        **provenance.bf16_products(),
    }


_HANDLING = ("step", "message", "copying")


def _handling(fields: Samples, configs: Sequence[TrialConfig], cores: Floats) -> Samples:
    """Returns the core-seconds of a step, a message and a byte with which a rank of balanced rings
    takes ``cores``: those with the least relative errors; and the spread that these leave."""
    from scipy.optimize import nnls  # takes a while to import

    link = Link(bandwidth=1e30, latency=0.0)
    every = dict.fromkeys(_HANDLING, 0.0) | {"inner": link, "outer": link, "cores": RANKS}
    bare = entry(fields, "measured").model_copy(update=every)

    def predicted(hardware: Hardware) -> Floats:
        on = Fleet(LOCAL, hardware, 1, RANKS)
        return np.array([cost_model.predict(config, on).time_ms / 1e3 for config in configs])

    # Costs are linear in the three unknowns: the slope of each comes from one unit of it.
    without, unit = predicted(bare), 1e-6
    slopes = [(predicted(bare.model_copy(update={n: unit})) - without) / unit for n in _HANDLING]
    table = np.stack(slopes, 1) / cores[:, None]
    solved, _ = nnls(table, 1 - without / cores)
    wrong = without / cores + table @ solved - 1
    handling = dict(zip(_HANDLING, solved.tolist(), strict=True))
    return handling | {"spread": max(fields["spread"], float(np.quantile(np.abs(wrong), 0.8)))}
