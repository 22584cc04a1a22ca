"""The work of the stages of a run; ``first_light`` has their order and limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from ringray_kernels.backends import on_device
from ringray_kernels.bench import problems
from ringray_kernels.bench.contenders import CONTENDERS, LAST, Ringray, is_ours
from ringray_kernels.bench.problems import Direction, Point, VirtualPoint, Which
from ringray_kernels.bench.session import BenchSession

_SPARSE = ("ringray", "ringray-portable", "torch-varlen")  # take windows and documents
_LONGEST = 16 * 1024


def _ours(session: BenchSession) -> list[str]:
    """Returns ours; from now on with the kernels of GPUs on any device, or on none."""
    names = [name for name in session.names if is_ours(name)]
    for name in names:
        ours = cast("Ringray", CONTENDERS[name])
        CONTENDERS[name] = replace(ours, backend=on_device("auto", "cuda"))
    return names


def memcheck(session: BenchSession) -> None:
    """Runs ours in few calls, under a tool that sees accesses out of bounds."""
    # Each tensor is an allocation of its own; read at the first one.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    bad = {record.contender for record in session.records if record.status in ("failed", "wrong")}
    names = [name for name in _ours(session) if name not in bad]
    points = problems.smoke_points(session.device.type)
    for point in (p for p in points if p.form == "hops" and p.head_dim <= 128):
        for name in names:
            if CONTENDERS[name].unsupported(point, session.device) is None:
                CONTENDERS[name].prepare(point, problems.make_inputs(point, session.device, 0))()
                session.fact("in bounds", case=point.name, contender=name)


def _headlines(session: BenchSession) -> list[Point]:
    """Returns the points by which kernels are compared; on a CPU, which has none, tiny ones."""
    points = problems.points("quick", session.device.type)
    return [point for point in points if problems.is_headline(point)] or points


def _others(session: BenchSession) -> list[Point]:
    """Returns dense points of other head dims, lengths and head counts."""
    short = [p for p in problems.points("all", session.device.type) if p.seq_len <= _LONGEST]
    dense = [p for p in short if p.mask in ("full", "causal")]
    return [point for point in dense if not problems.is_headline(point)]


def _check(session: BenchSession, *, portable: bool) -> None:
    names = [name for name in _ours(session) if (name == "ringray-portable") is portable]
    session.check_only = True
    session.points(problems.smoke_points(session.device.type), names)


def _against(direction: Direction, session: BenchSession) -> None:
    points = [point for point in _headlines(session) if point.direction == direction]
    session.points(points, [name for name in session.names if name not in LAST])


def _sparse(session: BenchSession) -> None:
    """Measures the sparse masks and a ring."""
    points, rings = cases("quick", session)
    session.names = [name for name in session.names if name in _SPARSE]
    session.measure([p for p in points if p.mask in ("window", "documents")], rings[:1])


def cases(which: Which, session: BenchSession) -> tuple[list[Point], list[VirtualPoint]]:
    """Returns the points and the virtual rings of ``--quick`` or ``--all``."""
    rings = problems.virtual_points(which, session.device.type)
    points = problems.points(which, session.device.type)
    return session.chosen(points), session.chosen(rings) if "ringray" in session.names else []


WORK: dict[str, Callable[[BenchSession], bool | None]] = {
    "portable": partial(_check, portable=True),
    "candidates": partial(_check, portable=False),
    "memcheck": memcheck,
    "forward": partial(_against, "forward"),
    "backward": partial(_against, "backward"),
    "sparse": _sparse,
    "sweep": lambda bench: bench.points(_others(bench), [*filter(is_ours, bench.names)]),
    "flex-attention": lambda bench: bench.last(_headlines(bench)),
    "summary": BenchSession.summary,
    "quick": lambda bench: bench.measure(*cases("quick", bench)),
    "all": lambda bench: bench.measure(*cases("all", bench)),
}
