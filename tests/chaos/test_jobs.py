"""Sweeps as jobs of a real cluster: a head without CPUs, a node with four, a token."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringray.base import provenance
from tests.chaos.struck import ended
from tests.support import place as drive
from tests.support import ray_heads
from tests.support.place import Done, tiny
from tests.support.ray_heads import Head

REPLICAS = 20


def copied(folder: Path) -> Path:
    """A copy of this checkout's source."""
    for name in ("ringray", "kernels", "cluster"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(drive.REPOSITORY / name, folder / name, ignore=ignore)
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """Its node has a ringray of its own installed, an older one."""
    old = copied(tmp_path_factory.mktemp("old"))
    with (old / "ringray" / "lab" / "ring" / "actor.py").open("a") as file:
        file.write("# as it was\n")
    for place in drive.place(tmp_path_factory.mktemp("home")):
        with ray_heads.cluster(place, {"PYTHONPATH": f"{old}:{old / 'kernels'}"}) as made:
            yield made
        place.check_nothing_is_left()


def submit(head: Head, spec: Path, *more: object) -> subprocess.Popen[str]:
    return head.place.start("submit", spec, "--address", head.url, *more)


def submitted(head: Head, spec: Path, *more: object) -> Done:
    return head.place.end(submit(head, spec, *more))


@pytest.mark.chaos
def test_a_job_is_followed_and_its_results_stay(head: Head) -> None:
    spec = head.place.spec(tiny("followed", replicas=3))
    begun = time.time()
    done = submitted(head, spec)
    assert done.code == 0, done.out + done.err
    rows = head.place.trials("followed")
    assert [row.status for row in rows] == ["ok"] * 3
    assert rows[0].started is not None
    print(f"from submit to the first trial {rows[0].started - begun:.1f} s")
    assert re.search(r"followed [0-9a-f]{12}: job ringray-[0-9a-f]{12}-1 at http://", done.out)
    assert "[3/3]" in done.out
    assert done.out.endswith("complete\n")
    assert f"store:  {head.place.home / 'store.db'}" in done.out
    # What was sent ran, on the node too: a ring of two sources is refused.
    (sweep,) = [row for row in head.place.sweeps() if row.name == "followed"]
    assert sweep.environment["code"] == provenance.code_digest()
    here = provenance.git_state()
    assert (sweep.environment["git"] or {}).get("commit") == (here and here["commit"])
    head.check_nothing_is_held()


@pytest.mark.chaos
def test_detached_attached_and_stopped(head: Head) -> None:
    spec = head.place.spec(tiny("stopped", replicas=REPLICAS, repeats=400))
    detached = submit(head, spec, "--detach")
    drive.wait_until("3 trials", lambda: ended(head.place, "stopped") >= 3 or detached.poll())
    done = head.place.end(detached)
    assert done.code == 0, done.err
    assert f"follow: ringray submit {spec} --address {head.url}" in done.out
    follower, leaver = submit(head, spec), submit(head, spec)
    read = ""
    while f"3/{REPLICAS}]" not in read:
        assert leaver.stdout is not None
        line = leaver.stdout.readline()
        assert line, leaver.communicate()
        read += line
    assert "runs already" in read
    leaver.send_signal(signal.SIGINT)
    left = head.place.end(leaver)
    assert left.code == 130, left.err
    assert "continues" in left.out
    assert left.errors == []
    stopped = head.place.run("stop", "stopped", "--address", head.url)
    assert stopped.code == 0, stopped.err
    done = head.place.end(follower)
    assert done.code == 130, done.out + done.err
    assert "to continue it: ringray submit" in done.out
    (sweep,) = [row for row in head.place.sweeps() if row.name == "stopped"]
    assert sweep.status == "interrupted"  # by its own driver, which was not killed
    assert set(sweep.counts) == {"ok"}
    assert 3 <= sweep.counts["ok"] < REPLICAS
    (parent,), children = head.place.mlflow("stopped")
    assert (parent.info.status, len(children)) == ("KILLED", sweep.counts["ok"])
    head.check_nothing_is_held()
    before = {row.key: row for row in head.place.trials("stopped") if row.status is not None}
    again = submitted(head, spec)
    assert again.code == 0, again.out + again.err
    assert f"{len(before)} trials measured before" in again.out
    rows = head.place.trials("stopped")
    assert [row.status for row in rows] == ["ok"] * REPLICAS
    assert {row.key: row for row in rows if row.key in before} == before
    jobs = head.ask("/api/jobs/")
    names = [x["submission_id"] for x in jobs if (x["metadata"] or {}).get("name") == "stopped"]
    assert sorted(name[-2:] for name in names) == ["-1", "-2"]
    late = head.place.run("stop", spec, "--address", head.url)
    assert (late.code, "has ended already: complete" in late.out) == (0, True)


@pytest.mark.exhaustive
def test_a_mixed_ring_is_refused(head: Head) -> None:
    """Without a job the node imports what it has."""
    done = head.place.run("run", head.place.spec(tiny("mixed")), "--address", head.address)
    assert done.code == 2, done.out + done.err
    assert re.search(r"workers on [\d.]+ run different code than this driver", done.err)
    assert "`ringray submit`" in done.err
    assert {row.status for row in head.place.trials("mixed")} == {None}
    head.check_nothing_is_held()


@pytest.mark.chaos
def test_the_plain_command(head: Head, tmp_path: Path) -> None:
    """`ray job submit` from a checkout."""
    folder = copied(tmp_path)
    for name in (".gitignore", ".rayignore"):
        shutil.copy(drive.REPOSITORY / name, folder / name)
    (folder / "experiments").mkdir()
    (folder / "experiments" / "plain.yaml").write_text(tiny("plain"))
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.url,
        "--working-dir", ".", "--runtime-env", "cluster/runtime_env.yaml", "--",
        "python", "-m", "ringray", "run", "experiments/plain.yaml",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=head.place.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (sweep,) = [row for row in head.place.sweeps() if row.name == "plain"]
    assert (sweep.status, sweep.counts) == ("complete", {"ok": 1})
    assert sweep.environment["code"] == provenance.code_digest()
