"""Parts of Ray that are killed while ringray waits for them: a sentence, never Ray's own end."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support import place as drive
from tests.support import ray_heads
from tests.support.exhaustive import exhaustive

if TYPE_CHECKING:
    from tests.support.place import Place

pytestmark = pytest.mark.chaos

AGENTS = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")  # which title themselves


def kill(place: Place, part: str) -> None:
    """Kills the processes whose program ends with ``part``."""

    def found() -> list[psutil.Process]:
        programs = {one: drive.title(one).partition(" ")[0] for one in place.processes()}
        return [one for one, program in programs.items() if program.endswith(part)]

    for one in drive.wait_until(part, found):
        with suppress(psutil.Error):
            one.kill()


@pytest.mark.parametrize("part", ["/raylet", *exhaustive("/gcs_server", *AGENTS)])
def test_a_part_of_the_embedded_ray_is_killed(place: Place, part: str) -> None:
    running = place.start("run", place.spec(drive.tiny("small", replicas=900, repeats=200)))
    drive.wait_until("the first trials", lambda: len(ended(place)) > 1)
    kill(place, part)
    done = place.end(running)
    assert done.code == 3, done.err
    (line,) = done.errors
    assert "a local Ray has ended" in line
    assert "; Ray's logs are in /" in line
    assert "`ringray resume SWEEP` continues" in line
    assert place.sweeps()[0].status == "interrupted"
    place.check_nothing_is_left()


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["/gcs_server", "/raylet"])
def test_a_part_of_an_embedded_ray_that_starts_is_killed(place: Place, part: str) -> None:
    """It is started again, beside what is left of the first start in the driver."""
    running = place.start("run", place.spec(drive.tiny("small")), "--no-tracking")
    kill(place, part)
    done = place.end(running)
    assert done.code == 0, done.err
    assert f"a local Ray cannot start: its {part[1:]} has ended; Ray's logs are in /" in done.err
    assert done.err.count("starting it again") == 1
    assert "Traceback" not in done.err
    place.check_nothing_is_left()


@pytest.mark.exhaustive
def test_the_control_plane_of_a_cluster_is_killed(place: Place) -> None:
    with ray_heads.cluster(place, {"PYTHONPATH": place.environment["PYTHONPATH"]}) as head:
        spec = place.spec(drive.tiny("small", replicas=900, repeats=200))
        running = place.start("run", spec, "--no-tracking", "--address", head.address)
        drive.wait_until("the first trials", lambda: len(ended(place)) > 1)
        kill(place, "/gcs_server")
        done = place.end(running)
    assert done.code == 3, done.err
    assert f"Ray at {head.address} has ended or no longer answers" in done.err


def ended(place: Place) -> list[object]:
    return [row for row in place.trials("small") if row.status] if place.sweeps() else []
