"""Each class of fault on real rings: what is recorded, what the user reads, how soon it goes on;
and signals that all processes of a job get."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.chaos import sabotage
from tests.chaos.struck import NODE, REPLICAS, begun, faults, raylet_of, recovered
from tests.support import place as drive
from tests.support import ray_heads
from tests.support.place import Place, tiny

pytestmark = pytest.mark.chaos


def test_a_frozen_rank_is_replaced(place: Place) -> None:
    """Long before the trial's deadline."""
    driver = begun(place, tiny("frozen", size=3, replicas=REPLICAS, repeats=60))
    victim = place.ranks()[1]
    done, fault = recovered(place, driver, "frozen", victim.suspend)
    assert fault["kind"] == "stalled"
    assert len(fault["ranks"]) == 1, "the others only waited for it"
    assert "stalled" in done.out
    assert not victim.is_running()
    place.check_nothing_is_left()


def test_a_trial_that_does_not_end_is_a_result(place: Place) -> None:
    """With what every rank was at; the one that does not come is named, not those that wait."""
    sabotage.prepare(place, sabotage.NO_END)
    limit = 20.0
    text = tiny("endless", size=3, replicas=REPLICAS, repeats=40, timeout=f"{limit:g}s")
    driver = begun(place, text)
    since = time.time()
    sabotage.strike(place)
    done = place.end(driver)
    assert done.code == 1, done.out + done.err
    rows = place.trials("endless")
    assert sorted(row.status or "" for row in rows) == ["ok"] * (REPLICAS - 1) + ["timeout"]
    (row,) = [row for row in rows if row.status == "timeout"]
    assert row.ended is not None
    print(f"given up {row.ended - since:.1f} s after it stuck, deadline {limit:g} s")
    assert row.attempts == 1
    (fault,) = faults(row)
    assert (fault["kind"], fault["ranks"]) == ("timeout", [1])
    assert fault["hop"].startswith(("warm-up", "repeat"))
    assert f"rank 1 on {fault['node']}" in (row.reason or "")
    assert row.reason in done.out
    stacks = Path(fault["stacks"]).read_text()
    assert all(f"rank {rank}\n" in stacks for rank in range(3))
    assert "sitecustomize" in stacks.split("rank 1\n")[1].split("rank 2\n")[0]
    place.check_nothing_is_left()


@pytest.mark.exhaustive
def test_the_last_words_of_a_rank(place: Place) -> None:
    sabotage.prepare(place, sabotage.CRASH)
    driver = begun(place, tiny("crash", size=3, replicas=REPLICAS, repeats=40))
    done, fault = recovered(place, driver, "crash", lambda: sabotage.strike(place))
    assert (fault["kind"], fault["ranks"]) == ("rank-died", [1])
    assert "that was not to be" in fault["log"]
    assert "that was not to be" in done.out
    place.check_nothing_is_left()


SHORT = """\
version: 1
name: short
kind: latency
ring: {size: 2, device: cpu}
problem: {seq_len: [64, 8192], heads: 1, head_dim: 16, dtype: float32, direction: forward,
          window: 7}
measure: {warmup: 1, repeats: 2, replicas: 2, baseline: {name: sdpa, threads: 1}}
limits: {rank_memory: 160MiB}
"""


def test_memory_that_one_rank_lacks(place: Place) -> None:
    """Rank 0 alone needs a mask of 256 MiB; all agree on it, and the ring goes on."""
    done = place.run("run", place.spec(SHORT), "--no-tracking")
    assert done.code == 0, done.out + done.err
    rows = place.trials("short")
    assert sorted((row.config["seq_len"], row.status) for row in rows) == [
        (64, "ok"), (64, "ok"), (8192, "oom"), (8192, "oom"),
    ]  # fmt: skip
    for row in rows:
        if row.status == "ok":
            continue
        assert row.started is not None
        assert row.ended is not None
        print(f"oom {row.ended - row.started:.2f} s after the trial began: {row.reason}")
        (fault,) = faults(row)
        assert (fault["kind"], fault["ranks"]) == ("out-of-memory", [0])
        assert fault["asked_bytes"] >= 64 << 20
        assert fault["limit_bytes"] == 160 << 20
        assert 0 <= fault["free_bytes"] < 160 << 20
        assert "limits.rank_memory 160 MiB" in (row.reason or "")
    assert done.out.count("starting 2 cpu actors") == 1
    place.check_nothing_is_left()
    # Another limit is another question; what did fit is not asked again.
    again = place.run("run", place.spec(SHORT.replace("160MiB", "3GiB")), "--no-tracking")
    assert again.code == 0, again.out + again.err
    assert "2 trials measured before" in again.out
    assert {row.status for row in place.trials("short")} == {"ok"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (sabotage.NO_MEMORY, "oom", "out-of-memory"),
        (sabotage.NO_SHAPE, "failed", "compile-error"),
    ],
)
def test_one_rank_fails_inside_a_pass(place: Place, body: str, status: str, kind: str) -> None:
    """The others wait for it in a hop; nobody waits for them."""
    sabotage.prepare(place, body)
    driver = begun(place, tiny("inside", size=3, replicas=REPLICAS, repeats=40))
    since = time.time()
    sabotage.strike(place)
    done = place.end(driver)
    assert done.code == (0 if status == "oom" else 1), done.out + done.err
    rows = place.trials("inside")
    assert sorted(row.status or "" for row in rows) == sorted(["ok"] * (REPLICAS - 1) + [status])
    (row,) = [row for row in rows if row.status == status]
    assert row.ended is not None
    print(f"{kind} recorded after {row.ended - since:.1f} s: {row.reason}")
    assert row.attempts == 1
    (fault,) = faults(row)
    assert (fault["kind"], fault["ranks"]) == (kind, [1])
    if status == "oom":
        assert fault["asked_bytes"] == 1 << 50
    place.check_nothing_is_left()


def test_a_lost_node(place: Place) -> None:
    """The next ring is on what is left, before Ray itself believes it."""
    text = tiny("lost", size=2, replicas=REPLICAS, repeats=60)
    text = text.replace("threads: 1", "threads: 1, placement: strict-spread")
    with ray_heads.cluster(place, NODE, NODE, NODE) as head:
        driver = begun(place, text, "--address", head.address)
        raylet = raylet_of(place.ranks()[1])
        done, fault = recovered(place, driver, "lost", raylet.kill)
        assert fault["kind"] == "node-lost", fault
        assert len(fault["ranks"]) == 1
        assert fault["node"] in done.out
        assert "(raylet)" not in done.out
        head.check_nothing_is_held()


@pytest.mark.exhaustive
def test_a_node_on_which_rings_fail_again_and_again(place: Place) -> None:
    """Is left alone, as another one can hold the ring."""

    def met() -> int:
        return sum(len(faults(row)) for row in place.trials("again"))

    with ray_heads.cluster(place, NODE, NODE) as head:
        text = tiny("again", size=2, replicas=2 * REPLICAS, repeats=100, retries=5)
        driver = begun(place, text, "--address", head.address)
        killed: Counter[int] = Counter()  # ranks, by their raylet
        while max(killed.values(), default=0) < 2:
            before = met()
            victim = drive.wait_until("a ring", place.ranks)[0]
            killed[raylet_of(victim).pid] += 1
            victim.kill()
            drive.wait_until("it is tried again", lambda before=before: met() > before)
        (left,) = [raylet for raylet, times in killed.items() if times == 2]
        assert left not in {raylet_of(rank).pid for rank in place.ranks()}
        done = place.end(driver)
        assert done.code == 0, done.out + done.err
        assert done.out.count("is excluded for the rest of this run: rings failed there 2") == 1
        assert {row.status for row in place.trials("again")} == {"ok"}
        head.check_nothing_is_held()


def test_a_killed_rank_costs_one_try(place: Place) -> None:
    json = place.home / "a.jsonl"
    text = tiny("killed", size=3, replicas=REPLICAS, repeats=60)
    driver = begun(place, text, "--json", json, tracked=True)
    done, fault = recovered(place, driver, "killed", place.ranks()[2].kill)
    assert done.errors == []
    # A second fault can follow from the first only if a new ring formed with ranks of the old one.
    assert (fault["kind"], len(fault["ranks"])) == ("rank-died", 1)
    assert done.out.count("trying again on a new ring") == 1
    assert "(raylet)" not in done.out
    assert len(place.lines(json)) == REPLICAS
    (parent,), children = place.mlflow("killed")
    assert parent.info.status == "FINISHED"
    assert len(children) == REPLICAS
    place.check_nothing_is_left()


def test_without_retries_a_killed_rank_fails_its_trial(place: Place) -> None:
    driver = begun(place, tiny("failed", size=3, replicas=REPLICAS, repeats=60, retries=0))
    place.ranks()[1].kill()
    done = place.end(driver)
    assert done.code == 1, done.out + done.err
    rows = place.trials("failed")
    assert sorted(row.status or "" for row in rows) == ["failed"] + ["ok"] * (REPLICAS - 1)
    (reason,) = (row.reason or "" for row in rows if row.status == "failed")
    assert reason.startswith("rank ")
    assert reason in done.out
    place.check_nothing_is_left()


@pytest.mark.exhaustive
def test_a_rank_that_freezes_while_its_ring_starts_costs_one_try(place: Place) -> None:
    """It cannot be asked yet; but the other rank of its node has started."""
    driver = place.start("run", place.spec(tiny("early")), "--no-tracking")

    def starting() -> list[psutil.Process]:
        return [rank for rank in place.ranks() if "__init__" in drive.title(rank)]

    drive.wait_until("a rank starts", lambda: starting() or driver.poll() is not None)
    frozen = starting()[0]
    frozen.suspend()
    done = place.end(driver)
    assert done.code == 0, done.out + done.err
    (row,) = place.trials("early")
    assert (row.status, row.attempts) == ("ok", 2)
    (fault,) = faults(row)
    assert (fault["kind"], fault["hop"], len(fault["ranks"])) == ("stalled", "its start", 1)
    print(f"recorded {(row.ended or 0) - (row.started or 0):.1f} s after the first try began")
    assert not frozen.is_running()
    place.check_nothing_is_left()


@pytest.mark.parametrize(
    ("number", "send"),
    [
        pytest.param(signal.SIGINT, os.killpg, id="terminal"),
        pytest.param(signal.SIGTERM, os.kill, id="kill", marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGTERM, os.killpg, id="scheduler", marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_ends_it_in_order(
    place: Place, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    """A terminal sends Ctrl-C to all of the driver's process group, and a scheduler that stops a
    job SIGTERM: to the driver's own Ray too."""
    json = place.home / "a.jsonl"
    text = tiny("signalled", size=3, replicas=3 * REPLICAS, repeats=60)
    driver = begun(place, text, "--json", json, tracked=True)
    send(driver.pid, number)
    done = place.end(driver)
    assert done.code == 130, done.out + done.err
    assert done.errors == []
    assert "continue with: ringray resume signalled" in done.out
    (sweep,) = place.sweeps()
    assert sweep.status == "interrupted"
    # No trial was recorded as failed because its ring was taken down under it.
    assert set(sweep.counts) == {"ok"}
    assert sweep.counts["ok"] == len(place.lines(json)) < 3 * REPLICAS
    _, children = place.mlflow("signalled")
    assert len(children) == sweep.counts["ok"]
    place.check_nothing_is_left()
