"""Files are readable by their owner alone; no spec, store or table reaches out of its folder."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringray.base import private_files
from ringray.base.errors import PlaceError, UserError
from ringray.base.private_files import create_home, home
from ringray.lab.store import traces
from ringray.lab.store.store import Store
from ringray.lab.tracking import location as place
from ringray.lab.tracking import worker
from ringray.lab.trial.outcome import part_of_a_path
from ringray.tuning import table as tuned
from tests.support.place import wait_until
from tests.tuning.test_tuned import entry

DIGEST = "ab12" * 16


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def lax() -> Iterator[None]:
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def assert_closed(folder: Path) -> None:
    found = [folder, *folder.rglob("*")]
    assert len(found) > 1
    assert {str(one): oct(mode(one)) for one in found if mode(one) & 0o077} == {}


def fill() -> None:
    """Everything that ringray keeps."""
    with Store(home() / "store.db") as store:
        assert not store.sweeps()
        assert {one.name for one in home().iterdir()} >= {"store.db", "store.db-wal"}
        place.check(place.resolve_uri(None))
        place.artifact_root("sqlite:///x")
        worker.create_log(DIGEST)
        traces.keep(traces.path_of(DIGEST, "k"), "[]")
        tuned.add([entry()])
        assert_closed(home())


def test_everything_is_closed_whatever_the_umask(own_home: Path, lax: None) -> None:
    """Also what is there already."""
    fill()
    kept = sqlite3.connect(own_home / "store.db")  # so that -wal and -shm stay
    kept.execute("SELECT count(*) FROM sweeps")
    for one in own_home.rglob("*"):
        one.chmod(0o777 if one.is_dir() else 0o666)
    fill()
    kept.close()


def test_a_home_that_was_chosen_is_not_closed_but_what_is_in_it_is(own_home: Path) -> None:
    """It may be a folder of the user's with other things in it."""
    own_home.mkdir(mode=0o755)
    own_home.chmod(0o755)
    with Store(home() / "store.db"):
        assert mode(own_home) == 0o755
        assert mode(own_home / "store.db") == 0o600


def test_the_default_home_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGRAY_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ringray").mkdir()
    (tmp_path / ".ringray").chmod(0o755)
    assert mode(create_home()) == 0o700


def test_links_that_wait_are_not_followed(tmp_path: Path, own_home: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    table = tmp_path / "shared" / "table.json"
    table.parent.mkdir()
    for name in (f".table.json.{os.getpid()}", "table.json"):
        (table.parent / name).symlink_to(victim)
    tuned.write([entry()], table)
    assert not table.is_symlink()
    (home() / "logs").mkdir(parents=True)
    (home() / "logs" / f"tracking-{DIGEST[:12]}.log").symlink_to(victim)
    with pytest.raises(PlaceError, match="cannot be written"):
        worker.create_log(DIGEST)
    (home() / "tuned").mkdir()
    (home() / "tuned" / ".local.json.lock").symlink_to(victim)
    with pytest.raises(UserError):
        tuned.add([entry()])
    assert victim.read_text() == "kept"


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    private_files.write(path, "first")
    with pytest.raises(UnicodeEncodeError):
        private_files.write(path, "second\ud800")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["../x", "", "..", "a\x00", "x" * 65, "é", "a'"])
def test_digests_and_keys_are_no_paths(text: str) -> None:
    for use in (part_of_a_path, worker.create_log, lambda one: traces.path_of(DIGEST, one)):
        with pytest.raises(PlaceError, match="store is damaged"):
            use(text)


# Files that a spec may name


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////etc/ringray.db", "sqlite:///../outside.db", "sqlite:///link/x.db",
        "sqlite:///x.db?vfs=unix-none", "postgresql://h/db?sslkey=/home/me/.ssh/id",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3D/tmp/evil.so", "mysql://h/db?read_default_file=/x",
    ],
)  # fmt: skip
def test_a_spec_names_no_place_outside(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "link").symlink_to(tmp_path)
    monkeypatch.chdir(work)
    with pytest.raises(PlaceError, match=r"tracking\.uri .*only the environment can"):
        place.resolve_uri(uri)
    assert sorted(tmp_path.iterdir()) == [work]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # who sets that may do what they like
    assert place.resolve_uri(None)


@pytest.mark.parametrize("uri", ["sqlite+pysqlite:////etc/x.db", "file:///etc", "databricks"])
def test_a_spec_names_no_place_of_a_kind_that_is_not_looked_into(uri: str) -> None:
    """Also where MLflow is said to have taken the sweep, and failures of the place are bearable."""
    with pytest.raises(PlaceError, match="has an unknown scheme"):
        place.resolve_uri(uri)


def test_a_spec_names_files_here_and_at_home(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("x.db", "sub/x.db", str(own_home / "x.db")):
        assert place.resolve_uri(f"sqlite:///{path}").startswith("sqlite:////")


@pytest.mark.parametrize(
    ("name", "uri"),
    [
        ("MLFLOW_TRACKING_TOKEN", "http://evil.example"),
        ("MLFLOW_TRACKING_PASSWORD", "https://evil.example:5000/x"),
        ("PGPASSWORD", "postgresql+psycopg2://evil.example/db"),
        ("MYSQL_PWD", "mysql://evil.example/db"),
    ],
)
def test_secrets_go_only_to_whom_the_environment_names(
    name: str, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.resolve_uri(uri) == uri
    monkeypatch.setenv(name, "hunter2-hunter2")
    for known in ("", "http://good.example", "https://evil.example:5001"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", known)
        with pytest.raises(PlaceError, match=f"would be sent {name}") as caught:
            place.resolve_uri(uri)
        assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert place.resolve_uri(uri) == uri


def test_so_does_the_file_of_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text("[mlflow]\n")
    with pytest.raises(PlaceError, match=r"would be sent ~/\.mlflow/credentials"):
        place.resolve_uri("http://evil.example")


def test_the_tracking_process_has_no_token_of_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "feedface" * 8)
    started = worker.Worker(DIGEST, "ringray.lab.tracking.process", 10.0, "http://127.0.0.1:1")
    try:
        path = Path(f"/proc/{started.process.pid}/environ")
        environment = wait_until("it has started", path.read_bytes)
        assert b"RINGRAY_HOME=" in environment
        assert b"feedface" not in environment
    finally:
        started.end(0.0)


# Content of an imported table


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("choice", "partition"), "../../x"), (("choice", "transport"), "x; rm -rf ~"),
        (("choice", "blocks"), "forward=x"), (("choice", "threads"), 0), (("bucket", "extra"), 1),
        (("bucket", "tokens"), 1.5), (("place", "hardware"), "x" * 501), (("metrics",), [1]),
        (("metrics",), {"median_ms": float("inf")}), (("when",), 10**400), (("choice",), None),
    ],
)  # fmt: skip
def test_a_table_that_means_nothing_is_refused(
    where: tuple[str, ...], value: object, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    tuned.write([entry()], path)
    data = json.loads(path.read_text())
    inside = data["entries"][0]
    for name in where[:-1]:
        inside = inside[name]
    inside[where[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=f"not a table of tuned choices: .*{where[-1]}"):
        tuned.read(path)


@pytest.mark.parametrize(
    "text", ['{"format": 1, "entries": [' + "[" * 100_000, "9" * 10_000, "\ud800"]
)
def test_a_table_that_is_a_trap_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match="not a table of tuned choices"):
        tuned.read(path)
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(UserError, match="larger than"):
        tuned.read(path)
    with pytest.raises(UserError, match="not a regular file"):
        tuned.read(Path("/dev/zero"))


def test_what_a_table_says_prints_no_codes(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuned.write([entry()], path)
    path.write_text(path.read_text().replace("NVIDIA H200", "x\\u001b[2J[/bold]"))
    assert tuned.read(path)[0].place.hardware == "x\ufffd[2J[/bold]"


# Open ports of an embedded Ray

RAY = """
import os, stat, sys
import psutil
from pathlib import Path
from ringray.lab.cluster import connect
from ringray.lab.cluster.placement_wait import WaitLimits
from ringray.lab.plan import plan
from ringray.lab.ring.group import ActorRing
from ringray.lab.specs import model as spec

text = "version: 1\\nname: a\\nkind: latency\\nring: {device: cpu}\\nproblem: {seq_len: 64}\\n"
trial = plan.build(spec.parse(text)).trials[0]
config = trial.config
with connect.connect(None) as place:
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
    ring = ActorRing(2, place.placement(config), 60.0, WaitLimits(60.0))
    ring.form(2)
    assert len(ring.run(trial.kind, config, 60.0)) == 2
    me = psutil.Process()
    listening = {
        one.laddr.ip
        for process in [me, *me.children(recursive=True)]
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }
    from ray._private.worker import _global_node
    folder = Path(_global_node.get_session_dir_path()).parents[1]
    print(sorted(listening), oct(stat.S_IMODE(folder.stat().st_mode)), flush=True)
    ring.close()
print(folder.exists(), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in os.environ)
"""


@pytest.mark.exhaustive
def test_an_embedded_ray_is_this_users_alone(tmp_path: Path) -> None:
    """All that driver, Ray, ranks and their stores listen on is the loopback, and strangers of the
    same machine reach neither sockets nor logs."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW"))
    }
    done = subprocess.run(
        [sys.executable, "-c", RAY], capture_output=True, text=True, check=False,
        env={**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    listening, gone = done.stdout.splitlines()[-2:]
    assert listening == "['127.0.0.1', '::ffff:127.0.0.1'] 0o700"
    assert gone == "False False"
