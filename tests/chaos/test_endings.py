"""What stays behind, and what is said, after signals at any moment and kills of drivers or Rays."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ringray.lab.store.store import Store
from tests.chaos.struck import NODE, begun
from tests.support import place as drive
from tests.support import ray_heads
from tests.support.exhaustive import exhaustive
from tests.support.place import Place, tiny, title, wait_until

pytestmark = pytest.mark.chaos

MOMENTS = 8
BORN_S = 0.2  # for Python itself to start


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "tmp").mkdir()
    for made in drive.place(tmp_path):
        made.variables["TMPDIR"] = str(made.ray)  # short
        made.unset = ("RAY_TMPDIR",)  # whose folder would be used as it is
        yield made


def _left(place: Place) -> set[str]:
    """Returns our temporary files."""
    return {one.name for one in place.ray.glob("rr*-*")} | {
        one.name for one in (place.home / "running").glob("*")
    }


@pytest.mark.exhaustive
def test_a_signal_ends_a_sweep_with_130_at_any_moment(place: Place) -> None:
    """At random moments of its whole life: imports, the start of Ray and ranks, trials, its end."""
    spec = place.spec(tiny("struck", replicas=10, repeats=20))
    began = time.monotonic()
    assert place.run("run", spec, "--store", "first.db").code == 0
    life = time.monotonic() - began
    draw = random.Random(7)
    ends = []
    for number in range(MOMENTS):
        sent = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)[number % 3]
        moment = BORN_S + draw.random() * life
        sweep = place.start("run", spec, "--store", f"store-{number}.db")
        time.sleep(moment)
        (os.killpg if number % 2 else os.kill)(sweep.pid, sent)
        done = place.end(sweep)
        ends.append(f"{sent.name} after {moment:.2f} s of {life:.2f}: {done.code}")
        print(ends[-1], f"{done.seconds:.1f} s later", flush=True)
        over = done.code == 0 and "10 ok" in done.out
        assert done.code == 130 or over, (ends, done.out[-2000:], done.err[-4000:])
        assert "Traceback" not in done.err, (ends, done.err[-4000:])
        assert not _left(place), ends
        place.check_nothing_is_left()


@pytest.mark.exhaustive
def test_the_next_command_removes_what_a_killed_driver_left(place: Place) -> None:
    sweep = begun(place, tiny("struck", replicas=500, repeats=50))
    family = psutil.Process(sweep.pid).children(recursive=True)
    sweep.kill()
    place.end(sweep)
    assert place.run("list").code == 0  # it only reads
    assert place.run("resume", "nothing").code == 2
    left = [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not left, [title(one) for one in left]
    assert not _left(place)


@pytest.mark.parametrize("how", ["deleted", *exhaustive("replaced")])
def test_a_sweep_whose_store_is_lost_stops_and_says_where_its_trials_are(
    place: Place, how: str
) -> None:
    sweep = begun(place, tiny("lost", replicas=300, repeats=50), tracked=True)
    for ending in ("", "-wal", "-shm"):
        (place.home / f"store.db{ending}").unlink()
    if how == "replaced":
        Store(place.home / "store.db").close()
    done = place.end(sweep)
    assert done.code == 2, done.err
    assert len(done.errors) == 1, done.err
    assert f"was {how} while it is in use" in done.err
    (kept,) = place.home.glob("store.db.rescued-*")
    assert str(kept) in done.err
    with Store(kept) as store:
        (row,) = store.sweeps()
    assert 0 < row.counts["ok"] < 300
    assert not _left(place)
    place.check_nothing_is_left()


# Parts of Ray

AGENTS = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")  # which title themselves


def kill(place: Place, part: str) -> None:
    """Kills the processes whose program ends with ``part``."""

    def found() -> list[psutil.Process]:
        programs = {process: title(process).partition(" ")[0] for process in place.processes()}
        return [process for process, program in programs.items() if program.endswith(part)]

    for process in wait_until(part, found):
        with suppress(psutil.Error):
            process.kill()


@pytest.mark.parametrize("part", ["/raylet", *exhaustive("/gcs_server", *AGENTS)])
def test_a_part_of_the_embedded_ray_is_killed(place: Place, part: str) -> None:
    running = begun(place, tiny("small", replicas=900, repeats=200), tracked=True)
    kill(place, part)
    done = place.end(running)
    assert done.code == 3, done.err
    (line,) = done.errors
    assert "a local Ray has ended" in line
    assert "; Ray's logs are in /" in line
    assert "`ringray resume SWEEP` continues" in line
    assert place.sweeps()[0].status == "interrupted"
    assert not _left(place)
    place.check_nothing_is_left()


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["/gcs_server", "/raylet"])
def test_a_part_of_an_embedded_ray_that_starts_is_killed(place: Place, part: str) -> None:
    """It is started again, beside what is left of the first start in the driver."""
    running = place.start("run", place.spec(tiny("small")), "--no-tracking")
    kill(place, part)
    done = place.end(running)
    assert done.code == 0, done.err
    assert f"a local Ray cannot start: its {part[1:]} has ended; Ray's logs are in /" in done.err
    assert done.err.count("starting it again") == 1
    assert "Traceback" not in done.err
    place.check_nothing_is_left()


@pytest.mark.exhaustive
def test_the_control_plane_of_a_cluster_is_killed(place: Place) -> None:
    with ray_heads.cluster(place, NODE) as head:
        text = tiny("small", replicas=900, repeats=200)
        running = begun(place, text, "--address", head.address)
        kill(place, "/gcs_server")
        done = place.end(running)
    assert done.code == 3, done.err
    assert f"Ray at {head.address} has ended or no longer answers" in done.err
