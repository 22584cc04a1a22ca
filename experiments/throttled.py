"""Predicted beside measured times on a ring of two machines, at three bandwidths of their link.

    ringray calibrate && sudo python experiments/throttled.py

Two ranks run in network namespaces of their own, whose link a token bucket (``tc``) shapes. The
prediction takes calls from the calibration and the bandwidth from the shaper, so that no number of
it was measured on this link. Needs root, ``ip``, ``tc`` and two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cluster import network
from ringray.base.errors import UserError
from ringray.lab.plan import plan
from ringray.lab.plan.trial import Trial
from ringray.lab.predict import calibration
from ringray.lab.predict.hardware import LOCAL, Fleet, Link
from ringray.lab.specs import model as specs

BANDWIDTHS = (200, 1000, 4000)  # Mbit/s
CLOSE = 0.03  # a choice that is slower than the best by less is as good
REPEATS = 7
SPEC = """
version: 1
name: throttled
kind: latency
ring: {size: 2, device: cpu}
problem: {seq_len: %d, heads: 4, kv_heads: %d, head_dim: 64, dtype: %s, direction: %s}
strategy:
  partition: [contiguous, striped, zigzag, zigzag-token]
  transport: [ring, allgather, ulysses]
measure: {baseline: null}
"""
PROBLEMS = (
    (3072, 4, "float32", "forward"),
    (6144, 2, "float32", "forward"),
    (3072, 4, "bfloat16", "forward+backward"),
)


class Point(NamedTuple):
    """One strategy of a problem on a link of so many Mbit/s."""

    mbit: int
    problem: tuple[Any, ...]
    strategy: str
    ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Returns the relative error of the predicted time."""
        return self.predicted_ms / self.ms - 1


def planned(problem: tuple[Any, ...], on: Fleet | None = None) -> list[Trial]:
    """Returns the trials of a problem, predicted on ``on``."""
    return list(plan.build(specs.parse(SPEC % problem, "throttled.yaml"), on).runnable)


def fleet(local: Fleet, mbit: int) -> Fleet:
    """Returns two machines of one core as calibrated, with a link of ``mbit`` Mbit/s."""
    bandwidth = network.payload(f"{mbit}mbit")
    link = Link(bandwidth=bandwidth, latency=local.hardware.inner.latency)
    hardware = local.hardware.model_copy(update={"outer": link, "cores": 1})
    return replace(local, hardware=hardware, nodes=2, per_node=1)


def rank() -> None:
    """Measures all points on this rank of two; rank 0 prints their ms by turn, slowest rank's."""
    import torch
    import torch.distributed as dist

    import ringray

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for problem in PROBLEMS:
        for trial in planned(problem):
            one, rows = trial.config.problem, trial.config.padded // 2
            strategy, dtype = trial.config.strategy, getattr(torch, one.dtype)
            q, dout = (torch.randn(1, one.heads, rows, 64, dtype=dtype) for _ in range(2))
            k, v = (torch.randn(1, one.kv_heads, rows, 64, dtype=dtype) for _ in range(2))
            leaves = [x.requires_grad_("backward" in one.direction) for x in (q, k, v)]
            times = []
            for _ in range(REPEATS + 1):
                dist.barrier()
                began = time.perf_counter()
                out = ringray.ring_attention(
                    *leaves, partition=strategy.partition, transport=strategy.transport
                )
                if isinstance(out, torch.Tensor) and out.requires_grad:
                    out.backward(dout)
                took = torch.tensor((time.perf_counter() - began) * 1e3)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times.append(float(took))
            if dist.get_rank() == 0:
                print(json.dumps(times[1:]), flush=True)
    dist.destroy_process_group()


def measure(machines: list[network.Machine]) -> list[float]:
    """Returns the median ms of all points."""
    shared = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": "29400", "WORLD_SIZE": "2"}
    shared |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*one.inside, sys.executable, __file__, "--rank"],
            env={**os.environ, **shared, "RANK": str(number)}, stdout=subprocess.PIPE, text=True,
        )
        for number, one in enumerate(machines)
    ]  # fmt: skip
    try:
        printed = [one.communicate()[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    if any(one.returncode for one in ranks):
        raise SystemExit("a rank failed; its lines are above")
    return [statistics.median(json.loads(line)) for line in printed[0].splitlines()]


def points(mbit: int, measured: list[float], local: Fleet) -> list[Point]:
    """Returns measured points beside their predictions."""
    on = fleet(local, mbit)
    trials = [(problem, trial) for problem in PROBLEMS for trial in planned(problem, on)]
    found = []
    for (problem, trial), ms in zip(trials, measured, strict=True):
        assert trial.predicted is not None
        name = f"{trial.config.strategy.partition} {trial.config.strategy.transport}"
        found.append(Point(mbit, problem, name, ms, trial.predicted.time_ms))
    return found


def show(found: list[Point]) -> None:
    """Prints all points by problem and bandwidth, then the errors and the choices."""
    won = []
    for problem in PROBLEMS:
        for mbit in BANDWIDTHS:
            some = sorted(one for one in found if (one.mbit, one.problem) == (mbit, problem))
            some.sort(key=lambda one: one.ms)
            choice = min(some, key=lambda one: one.predicted_ms)
            won.append(choice.ms <= some[0].ms * (1 + CLOSE))
            length, kv_heads, dtype, direction = problem
            print(
                f"\n{mbit:,} Mbit/s, {length:,} tokens, {kv_heads} K/V heads, {dtype}, {direction}"
            )
            for one in some:
                mark = "  chosen" if one is choice else ""
                print(
                    f"  {one.strategy:24}{one.ms:9.1f} ms{one.predicted_ms:9.1f} predicted "
                    f"{one.error:+7.1%}{mark}"
                )
    errors = np.abs([one.error for one in found])
    print(f"\npoints        {len(found)}")
    print(f"median error  {np.median(errors):.1%}")
    print(f"p90 error     {np.quantile(errors, 0.9):.1%}")
    print(f"choices       {sum(won)} of {len(won)} the fastest or within {CLOSE:.0%} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="F", help="write points to F")
    arguments = parser.parse_args()
    if arguments.rank:
        rank()
        return
    try:
        compare(arguments.json)
    except (UserError, PermissionError) as error:
        raise SystemExit(f"throttled: {error}") from None


def compare(into: str | None) -> None:
    """Measures, predicts and prints all points; writes them to ``into``."""
    local = calibration.fleet(LOCAL)
    found: list[Point] = []
    with network.machines(2) as (_, machines):
        for mbit in BANDWIDTHS:
            for one in machines:
                one.shape(f"{mbit}mbit")
            print(f"{mbit} Mbit/s", file=sys.stderr, flush=True)
            found += points(mbit, measure(machines), local)
    show(found)
    if into:
        Path(into).write_text(json.dumps([one._asdict() for one in found], indent=1))


if __name__ == "__main__":
    main()
