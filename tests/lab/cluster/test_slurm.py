"""cluster/slurm.sh, for real, on a stand-in of Slurm: tasks are processes of this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest

from cluster.network import machines
from tests.support import place as drive
from tests.support import slurm
from tests.support.place import Place, tiny

TWO = ("127.0.0.1", "127.0.0.1")
MANY = 300  # replicas; more than end in a test


@pytest.fixture
def network() -> Iterator[tuple[str, ...]]:
    """This machine and one with an address of its own."""
    try:
        with machines(1) as (host, (other,)):
            yield host, f"{other.name}/{other.address}"
    except PermissionError as error:
        pytest.skip(str(error))


BAD = {
    "none": ("", "no spec; expected: sbatch"),
    "wrong": (tiny("wrong").replace("heads: 2", "heads: -2"), "problem.heads"),
    "large": (tiny("large", size=3), "a ring of 3 needs 3 CPUs"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_before_ray_starts(name: str, place: Place) -> None:
    given, said = BAD[name]
    spec = [place.spec(given)] if "name: " in given else [given] if given else []
    done = place.end(slurm.start(place, *spec, nodes=TWO))
    assert done.code == 2, done.err
    assert said in done.err
    assert not (place.home / slurm.STARTED).exists()
    assert "Traceback" not in done.err


def test_nodes_that_do_not_join_end_the_job(place: Place) -> None:
    """A ring that does not fit is pruned by ringray itself, if another one fits."""
    text = tiny("some").replace("size: 2", "size: [2, 3]")
    done = place.end(slurm.start(place, place.spec(text), nodes=TWO, RINGRAY_JOIN_S="0"))
    assert done.code == 1, done.err
    assert "0 of 2 nodes joined Ray in 0 s" in done.err
    slurm.check_nothing_is_left(place)


@pytest.mark.slow
def test_a_sweep_runs_on_all_nodes_and_leaves_none(place: Place, network: tuple[str, ...]) -> None:
    spec = place.spec(tiny("whole"))
    image = {"RINGRAY_CONTAINER": slurm.CONTAINER}
    done = place.end(slurm.start(place, spec, "--no-tracking", nodes=network, **image), 300)
    assert done.code == 0, done.err
    contained = (place.home / slurm.CONTAINED).read_text()
    assert contained.count("python -m ray.scripts.scripts start") == 2
    assert contained.count("python -m ringray run") == 1
    (trial,) = place.trials("whole")
    assert trial.status == "ok"
    assert trial.environment["ring"]["nodes"] == 2
    slurm.check_nothing_is_left(place)
    lines = (place.home / slurm.STARTED).read_text().splitlines()
    started = sorted(lines, key=lambda line: line.partition("--labels=")[2])
    assert len(started) == 2
    for rank, line in enumerate(started):
        assert f"--labels=ringray.io/rack=leaf{rank}" in line
        assert f"--node-ip-address={network[rank].rpartition('/')[2]}" in line
        assert "--num-cpus=1 --num-gpus=0" in line


@pytest.mark.exhaustive
def test_a_cancelled_job_ends_as_ctrl_c_does(place: Place) -> None:
    """Slurm signals the script and the task of each node at the same time."""
    spec = place.spec(tiny("cancelled", replicas=MANY, repeats=30))
    script = slurm.start(place, spec, "--no-tracking", "--json", "out.json", nodes=TWO[:1], cpus=2)
    drive.wait_until("trials end", lambda: len(place.lines(place.home / "out.json")) > 1)
    (task,) = (one for one in place.processes() if drive.title(one).startswith("bash -c"))
    for pid in (task.pid, script.pid):
        psutil.Process(pid).send_signal(signal.SIGTERM)
    done = place.end(script)
    assert done.code == 130, done.err
    assert "continue with: ringray resume cancelled" in done.out
    (sweep,) = place.sweeps()
    assert sweep.status == "interrupted"
    slurm.check_nothing_is_left(place)
