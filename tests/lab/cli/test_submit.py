"""`ringray submit` and `stop` on a job server that is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringray.lab import cli
from tests.support.job_server import PLAN, SHORT, URL, Server, ends
from tests.support.small_spec import SMALL


def test_submit_follows_and_exits_as_the_sweep(
    server: Server, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for status, code, last in (
        ("SUCCEEDED", 0, "complete\n"),
        ("FAILED", 1, f"to repeat the failed trials: ringray submit {small} --address {URL}\n"),
        ("FAILED", 2, "refused\n"),
        ("FAILED", 130, f"to continue it: ringray submit {small} --address {URL}\n"),
    ):
        server.logs = [["1/6 done\n", ends(server, status, code)]]
        assert cli.main(["submit", small, "--address", URL]) == code
        out = capsys.readouterr().out
        assert "1/6 done\n" in out
        assert out.endswith(last)
    assert [sent["id"] for sent in server.sent] == [f"ringray-{SHORT}-{n}" for n in (1, 2, 3, 4)]


def test_a_job_that_never_started_is_an_error(
    server: Server, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        (job,) = server.jobs.values()
        job.status, job.error_type, job.message = "FAILED", "RUNTIME_ENV_SETUP_FAILURE", "no disk"

    server.logs = [[fail]]
    assert cli.main(["submit", small, "--address", URL]) == 2
    assert f"error: job ringray-{SHORT}-1 could not start: no disk" in capsys.readouterr().err


def test_detach_says_how_to_go_on(
    server: Server, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["submit", small, "--address", f"{URL}/", "--detach"]) == 0
    out = capsys.readouterr().out
    assert f"follow: ringray submit {small} --address {URL}\n" in out
    assert f"stop:   ringray stop small --address {URL}\n" in out
    assert cli.main(["submit", small, "--address", URL, "--detach"]) == 0
    out = capsys.readouterr().out
    assert f"job ringray-{SHORT}-1 runs already" in out
    assert "different source" not in out
    assert len(server.sent) == 1
    next(iter(server.jobs.values())).metadata["code"] = "0" * 64
    assert cli.main(["submit", small, "--address", URL, "--detach"]) == 0
    assert "it runs different source" in capsys.readouterr().out


def test_ctrl_c_detaches(server: Server, small: str, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    server.logs = [["a\n", interrupt]]
    assert cli.main(["submit", small, "--address", URL]) == 130
    assert f"detached; job ringray-{SHORT}-1 continues" in capsys.readouterr().out
    assert server.stops == []


@pytest.mark.parametrize("by", ["name", "digest", "spec"])
def test_stop_finds_the_running_job(
    server: Server, small: str, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.put(f"ringray-{SHORT}-1", "FAILED", driver_exit_code=1)
    server.put(f"ringray-{SHORT}-2")
    given = {"name": "small", "digest": PLAN.digest[:6].upper(), "spec": small}[by]
    assert cli.main(["stop", given, "--address", URL]) == 0
    assert server.stops == [f"ringray-{SHORT}-2"]
    assert f"job ringray-{SHORT}-2: stopped; `ringray submit SPEC" in capsys.readouterr().out
    assert cli.main(["stop", given, "--address", URL]) == 0
    assert "has ended already: stopped" in capsys.readouterr().out
    assert len(server.stops) == 1


# Before anything is sent


def test_the_spec_is_checked_before_anything_is_sent(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(SMALL.replace("heads: 2", "heads: two"))
    assert cli.main(["submit", str(path), "--address", "nonsense"]) == 2
    assert "bad.yaml:6: problem.heads" in capsys.readouterr().err
    assert server.jobs == {}


RAYS = (
    "2026-11-22 10:00:00,123\tINFO job_manager.py:531 -- Runtime env is setting up.\n"
    "Running entrypoint for job ringray-ask-d88a676d4eae: python -m ringray list\n"
)


def test_list_and_status_read_the_store_on_the_head(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [f"{RAYS}small  ab12  complete\n", "\x1b[31mred\n"]
    assert cli.main(["list", "--address", URL]) == 0
    assert capsys.readouterr().out == "small  ab12  complete\n"
    assert cli.main(["status", "small", "--all", "--store", "/s.db", "--address", URL]) == 0
    assert capsys.readouterr().out == "\ufffd[31mred\n"
    assert server.asked == [
        "python -m ringray list",
        "python -m ringray status small --all --store /s.db",
    ]
    assert server.jobs == {}  # none is left


def test_a_command_that_fails_on_the_head_says_why(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [f"{RAYS}ringray: error: there is no sweep 'smal'\n"]
    server.asked_ends = "FAILED"
    assert cli.main(["status", "smal", "--address", URL]) == 2
    said = f"`ringray status` failed on the head of {URL}: there is no sweep 'smal'"
    assert said in capsys.readouterr().err
    assert server.jobs == {}


def test_submit_fetches_the_records(
    server: Server, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "records.jsonl"
    server.logs, server.answers = [["1/6\n", ends(server)]], [RAYS + '{"status": "ok"}\n']
    assert cli.main(["submit", small, "--address", URL, "--json", str(out)]) == 0
    assert out.read_text() == '{"status": "ok"}\n'
    assert server.asked == [f"python -m ringray status {PLAN.digest} --json -"]
    server.logs, server.answers = [["1/6\n", ends(server)]], ['{"status": "ok"}\n']
    capsys.readouterr()
    assert cli.main(["submit", small, "--address", URL, "--json", "-"]) == 0
    printed, said = capsys.readouterr()
    assert printed == '{"status": "ok"}\n'
    assert "1/6" in said
    assert cli.main(["submit", small, "--address", URL, "--json", "-", "--detach"]) == 2
    assert cli.main(["submit", small, "--address", URL, "--json", "/nowhere/x"]) == 2
    assert len(server.sent) == 2
