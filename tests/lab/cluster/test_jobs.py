"""Sweeps as jobs: names, attempts, endings and addresses, on a job server that is made up; and what
is no job server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringray.base import deadline, provenance, source_digest
from ringray.base.errors import PlaceError, UserError
from ringray.lab import cli
from ringray.lab.cluster import head_command, job_package, job_server
from ringray.lab.cluster.job_package import packed
from ringray.lab.cluster.jobs import Job, Jobs
from ringray.lab.specs import model as spec
from tests.support.bad_servers import bad_server
from tests.support.job_server import PLAN, SHORT, URL, Server, ends
from tests.support.small_spec import SMALL

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def here(server: Server) -> Jobs:
    return Jobs(server, URL)


def submit(here: Jobs) -> tuple[Job, bool]:
    with job_package.packed(PLAN.spec) as shipment:
        return here.submit(PLAN, shipment)


# The files of a job


def test_the_first_submit_sends_the_source_and_the_spec(server: Server, here: Jobs) -> None:
    with packed(PLAN.spec) as shipment:
        job, started = here.submit(PLAN, shipment, "/data/a store.db")
    assert (job.id, job.attempt, started) == (f"ringray-{SHORT}-1", 1, True)
    (sent,) = server.sent
    assert sent["entrypoint"] == "python -m ringray run spec/spec.yaml --store '/data/a store.db'"
    assert sent["entrypoint_num_cpus"] == 0
    assert sent["metadata"]["sweep"] == PLAN.digest
    env = {**sent["runtime_env"]}
    assert not Path(env.pop("working_dir")).exists()  # it was a copy
    assert env == yaml.safe_load((ROOT / "cluster/runtime_env.yaml").read_text())
    tops = {name.split("/")[0] for name in server.files}
    assert tops <= {"ringray", "kernels", "spec", provenance.PROVENANCE}
    assert "kernels/ringray_kernels/api.py" in server.files
    assert not [name for name in server.files if "__pycache__" in name or "/." in name]


def test_a_table_of_lengths_goes_with_the_spec() -> None:
    packed_documents = spec.load(ROOT / "experiments" / "packed.yaml")
    with packed(packed_documents) as shipment:
        sent = spec.load(shipment.folder / shipment.spec)
        assert not list(shipment.folder.rglob("*.csv"))
    assert sent.digest == packed_documents.digest


def test_what_is_sent_is_what_runs_here_and_runs_by_itself(small: str) -> None:
    with packed(spec.load(small)) as shipment:
        packages = (shipment.folder / "ringray", shipment.folder / "kernels" / "ringray_kernels")
        assert source_digest.code_digest(packages) == provenance.code_digest()
        for package, sent in zip(provenance.packages(), packages, strict=True):
            for path in package.rglob("*"):
                if path.is_file() and path.suffix not in ("", ".py", ".pyc", ".typed"):
                    assert (sent / path.relative_to(package)).is_file(), path.name
        assert (shipment.folder / shipment.spec).read_text() == SMALL
        assert provenance._provenance(shipment.folder) == provenance.git_state()
        assert 0 < shipment.size < 4 << 20
        paths = os.pathsep.join(str(shipment.folder / name) for name in ("", "kernels"))
        done = subprocess.run(
            [sys.executable, "-m", "ringray", "plan", shipment.spec, "--on", "h100:1x8"],
            cwd=shipment.folder, env={**os.environ, "PYTHONPATH": paths},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not shipment.folder.exists()


def test_what_lies_beside_the_source_stays_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tuple(tmp_path / name for name in ("ringray", "ringray_kernels"))
    for package in packages:
        (package / "inner").mkdir(parents=True)
        beside = ("id_rsa", "notes.txt", ".env", "inner/tls.pem", "secrets.json")
        for name in ("__init__.py", "inner/a.py", "inner/a.yaml", *beside):
            (package / name).write_text("x")
        (package / "elsewhere").symlink_to(tmp_path)
    monkeypatch.setattr(provenance, "packages", lambda: packages)
    with packed(PLAN.spec) as shipment:
        sent = {path.name for path in shipment.folder.rglob("*") if path.is_file()}
    assert sent - {provenance.PROVENANCE} == {"__init__.py", "a.py", "a.yaml", "spec.yaml"}


def test_an_address_holds_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stop", "small", "--address", "http://me:hush@127.0.0.1:8265"]) == 2
    said = capsys.readouterr().err
    assert "RAY_AUTH_TOKEN" in said
    assert "hush" not in said


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"sweep": PLAN.digest, "name": "x\x1b[2J", "code": "c"}},
        {"id": f"ringray-{SHORT}-" + "9" * 5000}, {"id": f"ringray-{SHORT}-١"},
    ],
)  # fmt: skip
def test_jobs_that_only_look_like_ours(server: Server, here: Jobs, change: dict[str, Any]) -> None:
    metadata = {"sweep": PLAN.digest, "name": "small", "code": "c"}
    given = {"id": f"ringray-{SHORT}-1", "metadata": metadata} | change
    server.put(given["id"], metadata=given["metadata"])
    server.put("raysubmit_abc", metadata={"sweep": PLAN.digest})
    server.put(None, metadata=None)  # type: ignore[arg-type]  # a driver that nobody submitted
    server.put("ringray-000000000000-1")  # another sweep's name
    assert here.all() == []


# Once


def test_after_the_end_there_is_another_attempt(server: Server, here: Jobs) -> None:
    for attempt, status in ((1, "SUCCEEDED"), (2, "FAILED"), (10, "STOPPED")):
        server.put(f"ringray-{SHORT}-{attempt}", status)
    job, started = submit(here)
    assert (job.id, started) == (f"ringray-{SHORT}-11", True)


def test_of_two_submits_at_once_one_attaches(server: Server, here: Jobs) -> None:
    def other() -> None:
        server.put(f"ringray-{SHORT}-1")
        server.before = lambda: None

    server.before = other
    job, started = submit(here)
    assert (job.id, started) == (f"ringray-{SHORT}-1", False)
    assert server.sent == []


def test_a_name_that_is_taken_by_something_else(server: Server, here: Jobs) -> None:
    server.put(f"ringray-{SHORT}-1", metadata={})
    with pytest.raises(PlaceError, match=r"are taken at http://head:8265 .* `ray job delete`"):
        submit(here)


# The end of a job


@pytest.mark.parametrize(
    ("status", "code", "error", "ending"),
    [
        ("SUCCEEDED", 0, None, (0, "complete")),
        ("STOPPED", None, None, (130, "stopped")),
        ("FAILED", 1, None, (1, "failed")),
        ("FAILED", 2, None, (2, "refused")),
        ("FAILED", 130, None, (130, "interrupted")),
        ("FAILED", 3, None, (3, "lost its Ray")),
        ("FAILED", 4, None, (4, "stopped")),
        ("FAILED", 5, None, (1, "failed with exit code 5")),
        ("FAILED", -9, None, (130, "its driver was killed")),
        ("FAILED", 137, None, (130, "its driver was killed")),
        ("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED", (130, "its driver was killed")),
        ("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", (2, "could not start: why")),
        ("FAILED", 127, None, (2, "could not start: the head of the cluster finds no `python`")),
    ],
)
def test_endings(status: str, code: int | None, error: str | None, ending: tuple[int, str]) -> None:
    job = Job("id", "digest", "name", 1, "code", status, code, error, "why")
    assert job.ended
    assert job.ending()[0] == ending[0]
    assert job.ending()[1].startswith(ending[1])


# Following


def test_a_broken_connection_is_made_again_and_nothing_repeated(server: Server, here: Jobs) -> None:
    job, _ = submit(here)
    server.logs = [
        ["one\n", RuntimeError("WebSocket connection closed unexpectedly")],
        [OSError("refused")],
        ["one\ntw", "o\n", ConnectionError("reset")],
        ["one\n", "two\nthree\n"],  # closed in order, and yet the job goes on
        ["one\ntwo\n", "three\n", "four\n", ends(server, "FAILED", 1)],
    ]
    written: list[str] = []
    assert here.follow(job, written.append).exit_code == 1
    assert "".join(written) == "one\ntwo\nthree\nfour\n"


def test_a_head_that_is_gone_is_given_up(
    server: Server, here: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = submit(here)
    monkeypatch.setattr(head_command, "LOST_S", 0.0)
    server.logs = [["a\n"], *([OSError("no route")] for _ in range(3))]
    with pytest.raises(PlaceError, match=f"no answer from {URL} .* {job.id} may still run"):
        here.follow(job, lambda text: None)


def test_a_silent_job_is_asked_for_and_its_state_told(
    server: Server, here: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one whose log cannot be read, and one whose last connection stays open."""
    job, _ = submit(here)
    monkeypatch.setattr(deadline, "SAY_S", 0.0)
    monkeypatch.setattr(head_command, "QUIET_S", 0.02)
    server.logs = [[OSError("no route")], ["a", 60.0], ["a", "b", ends(server), 60.0]]
    written: list[str] = []
    assert here.follow(job, written.append).status == "SUCCEEDED"
    assert written == ["a", "b"]
    broken, silent = capsys.readouterr().err.splitlines()
    assert f"job {job.id} at {URL}, whose log cannot be read" in broken
    assert f"job {job.id} at {URL}, which is PENDING" in silent


def test_ctrl_c_ends_a_follower_whose_connection_breaks_by_it(
    server: Server, here: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def logs(id: str) -> AsyncIterator[str]:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ConnectionError("closing") from None
        yield ""

    job, _ = submit(here)
    monkeypatch.setattr(server, "tail_job_logs", logs)
    with pytest.raises(KeyboardInterrupt):
        here.follow(job, lambda text: None)


# Addresses


@pytest.mark.parametrize(
    "text",
    ["head:6379", "head", "ray://head:10001", "http://", "http://h:x", "http://a b", "auto"],
)
def test_not_the_url_of_a_job_server(text: str) -> None:
    with pytest.raises(UserError, match=r"expected|which is http://HOST:8265"):
        job_server.address(text)


def test_the_address_is_what_was_given_else_what_ray_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(UserError, match="no cluster to submit to; give --address http://HOST"):
        job_server.address(None)
    monkeypatch.setenv("RAY_ADDRESS", "http://a:1")
    assert job_server.address(None) == "http://a:1"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://b/")
    assert job_server.address(None) == "https://b"
    assert job_server.address("http://c:2") == "http://c:2"


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"<html>", "is not a Ray dashboard"),
        (b'{"version": "4"}', "is not a Ray dashboard: its answer is wrong: 'ray_version'"),
        (b'{"ray_version": "1.8.0"}', "Ray version 1.8.0 is running on the cluster"),
    ],
)
def test_what_is_no_job_server(answer: bytes, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # which a token of another test has set
    with (
        bad_server("silent", {"/api/version": answer}) as port,
        pytest.raises(PlaceError, match=match),
    ):
        job_server.connect(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token(status: int) -> None:
    from ray._private.authentication.http_token_authentication import (
        format_authentication_http_error,
    )
    from ray.exceptions import AuthenticationError

    answer = format_authentication_http_error(status, "Unauthorized")
    match = f"{URL} refuses the token, or gets none: .* set RAY_AUTH_MODE=token"
    with pytest.raises(PlaceError, match=match), job_server.answering(URL):
        raise AuthenticationError(answer)
