"""The place of a sweep's runs, a URI: its client, and checks that it can be used.

The checks are quick, run before any actor starts, and do not import MLflow.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ringray.base import locks, private_files
from ringray.base.errors import PlaceError, reason_of
from ringray.base.redaction import has_password, without_credentials
from ringray.lab.cluster.job_folder import check_lasting
from ringray.lab.tracking.sink import service_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

MODE = "workflowType=machine_learning"  # of MLflow's pages; its other mode hides the description
PROBE_S = 3.0  # seconds; for a server or a locked database to answer
_DATABASES = ("postgresql", "mysql", "mssql")
# Variables that MLflow or a database client sends to any server, by scheme.
_OF_MLFLOW = ("TOKEN", "PASSWORD", "USERNAME", "AUTH", "AWS_SIGV4", "CLIENT_CERT_PATH")
_SECRETS = {
    "http": tuple(f"MLFLOW_TRACKING_{name}" for name in _OF_MLFLOW),
    "postgresql": ("PGPASSWORD",),
    "mysql": ("MYSQL_PWD",),
}
_WAY_OUT = (
    "set tracking.uri in the spec or MLFLOW_TRACKING_URI, or tracking.enabled: false to do without"
)


def resolve_uri(spec_uri: str | None) -> str:
    """Returns the spec's URI, else ``$MLFLOW_TRACKING_URI``, else sqlite under the home folder.

    A relative sqlite path is made absolute: the command that opens it works from anywhere.

    Raises:
        PlaceError: a spec cannot name that place, only the environment can.
    """
    if spec_uri:
        _check_spec_uri(spec_uri.strip())
    uri = (spec_uri or os.environ.get("MLFLOW_TRACKING_URI") or "").strip()
    path = sqlite_path(uri)
    if not uri:
        return sqlite_uri(private_files.create_home() / "mlflow.db")
    if path is None:
        return uri
    check_lasting("the tracking database", path)
    return sqlite_uri(path) + "".join(uri.partition("?")[1:])


def sqlite_path(uri: str) -> Path | None:
    """Returns the absolute path of a sqlite URI with a file; None for other URIs."""
    scheme, separator, rest = uri.partition(":///")
    name = rest.partition("?")[0]  # options follow
    if scheme.lower() != "sqlite" or not separator or name in ("", ":memory:"):
        return None
    return Path(unquote(name)).absolute()


def sqlite_uri(path: Path) -> str:
    """Returns the URI of a sqlite file; the reverse of :func:`sqlite_path`."""
    return "sqlite:///" + str(path).replace("%", "%25").replace("?", "%3F")


def is_server(uri: str) -> bool:
    """Returns whether an MLflow server is behind the URI, and not a database."""
    return uri.lower().startswith(("http:", "https:"))


def artifact_root(uri: str) -> str | None:
    """Returns the folder for the files of a new experiment; None lets the server decide."""
    if is_server(uri):
        return None
    path = private_files.folder(private_files.create_home() / "artifacts")
    return path.as_uri() if "%" in str(path) else str(path)  # MLflow decodes a path too


def ui_command(uri: str, experiment_id: str = "", run_id: str = "") -> str:
    """Returns the address of the sweep's page on the server; of a database the shell command that
    shows it, and in a second line the page to open."""
    if service := service_of(uri):
        return str(service.page(experiment_id, run_id))
    page = f"/#/experiments/{experiment_id}/runs/{run_id}?{MODE}" if run_id else ""
    if is_server(uri):
        return without_credentials(uri).rstrip("/").replace("***@", "", 1) + page
    # A command with *** in it would not work, and a password does not belong on a screen.
    place = '"$MLFLOW_TRACKING_URI"' if has_password(uri) else shlex.quote(uri)
    mlflow = "mlflow" if shutil.which("mlflow") else f"{shlex.quote(sys.executable)} -m mlflow"
    command = f"{mlflow} ui --backend-store-uri {place} --host 127.0.0.1"
    return command + (f"\nthen open http://127.0.0.1:5000{page}" if page else "")


def cannot_be_used(uri: str, why: str) -> PlaceError:
    """Returns the error for a place that passed the checks and then failed."""
    return PlaceError(f"tracking at {without_credentials(uri)} cannot be used: {why}; {_WAY_OUT}")


def check(uri: str, seconds: float | None = None) -> None:
    """Raises PlaceError if the URI is malformed, its file cannot be used, or its server does not
    answer within ``seconds`` (by default ``PROBE_S``)."""
    if service := service_of(uri):
        service.check()
        return
    _check_kind(uri)
    if is_server(uri):
        _check_server(uri, PROBE_S if seconds is None else seconds)
    elif path := sqlite_path(uri):
        _check_file(path)


def is_users_own(uri: str) -> bool:
    """Returns whether the user's environment names the server, which so may get the credentials
    that ``~/.netrc`` has for its host."""
    try:
        ours, theirs = urlsplit(os.environ.get("MLFLOW_TRACKING_URI", "")), urlsplit(uri)
        names = ("scheme", "hostname", "port")
        return all(getattr(ours, name) == getattr(theirs, name) for name in names)
    except ValueError:
        return False


def _check_spec_uri(uri: str) -> None:
    """Refuses URIs that are dangerous in a spec, which may come from another person: files outside
    the working directory and the home folder, options of database drivers (some load libraries),
    and servers that would receive the secrets of the environment."""
    if service_of(uri):
        return
    _check_kind(uri)
    shown, path = without_credentials(uri), sqlite_path(uri)
    allowed = "only the environment can: set MLFLOW_TRACKING_URI"
    if path is not None:
        folders = (Path.cwd(), private_files.home())
        if not any(path.resolve().is_relative_to(folder.resolve()) for folder in folders):
            raise PlaceError(
                f"tracking.uri {shown!r}: a spec cannot name {path}, which lies outside of the "
                f"working directory and of RINGRAY_HOME; {allowed}"
            )
    if not is_server(uri) and "?" in uri:
        raise PlaceError(f"tracking.uri {shown!r}: a spec cannot set database options; {allowed}")
    scheme = "http" if is_server(uri) else uri.partition(":")[0].lower().partition("+")[0]
    secrets = [name for name in _SECRETS.get(scheme, ()) if os.environ.get(name)]
    if scheme == "http" and Path("~/.mlflow/credentials").expanduser().exists():
        secrets.append("~/.mlflow/credentials")
    if secrets and not is_users_own(uri):
        raise PlaceError(
            f"tracking.uri {shown!r} would be sent {secrets[0]}, which is meant for the server in "
            "MLFLOW_TRACKING_URI; set that to the same server, or remove the secret"
        )


def _check_kind(uri: str) -> None:
    """Raises PlaceError if MLflow would not take the URI for what it looks like."""
    scheme = uri.partition(":")[0].lower()
    why = None
    if scheme == "sqlite":
        if sqlite_path(uri) is None:
            why = "names no file: expected sqlite:///PATH"
    elif not is_server(uri) and (scheme.partition("+")[0] not in _DATABASES or "://" not in uri):
        why = (
            "has an unknown scheme: expected http://HOST:PORT, https://..., sqlite:///PATH, "
            f"{'://..., '.join(_DATABASES)}://... (MLflow no longer supports plain folders)"
        )
    if why:
        raise PlaceError(f"tracking URI {without_credentials(uri)!r} {why}; {_WAY_OUT}")


def _check_server(uri: str, seconds: float) -> None:
    # Imported here: the default place is a file, and ssl takes longer than the rest together.
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        parts = urlsplit(uri)
        if not parts.hostname:
            raise ValueError("it names no host")
        netloc = parts.netloc.rpartition("@")[2]
        health = parts._replace(netloc=netloc, path=f"{parts.path.rstrip('/')}/health", query="")
        urlopen(health.geturl(), timeout=seconds).close()
        return
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, HTTPError) and error.code < 500:
            return  # proxies and managed servers may have no /health
        cause = getattr(error, "reason", None) or error
        if isinstance(cause, ssl.SSLCertVerificationError):
            return  # MLflow has its own settings for certificates
        why = reason_of(cause) if isinstance(cause, Exception) else str(cause)
    raise PlaceError(
        f"no MLflow server answers at {without_credentials(uri)}: {why[:200]}; "
        f"start it (`mlflow server`) or {_WAY_OUT}"
    )


def client_of(uri: str) -> MlflowClient:
    """Returns a client for ``uri``; creates a sqlite database that is absent or empty.

    MLflow fills a new database in some forty migrations, table by table. Two processes that do it
    at once both fail, and one that is killed leaves a file that no later process can use. So it is
    filled under another name, under a lock, and then moved into place.
    """
    from mlflow import MlflowClient

    path = sqlite_path(uri)
    if path is not None:
        with private_files.locked(path):
            if not path.exists() or not path.stat().st_size:
                # A new name each time: MLflow keeps connections by it.
                with locks.temporary_folder(".mlflow", path.parent) as folder:
                    new = folder.path / "new.db"
                    private_files.database(new)
                    MlflowClient(tracking_uri=sqlite_uri(new)).search_experiments(max_results=1)
                    new.replace(path)
    return MlflowClient(tracking_uri=uri)


def _check_file(path: Path) -> None:
    why = None
    try:
        private_files.above(path)
        # Proves that it can be written, and gives a new one its mode.
        private_files.database(path)
        with closing(sqlite3.connect(path, timeout=PROBE_S, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        # MLflow would add its tables to any database, ringray's own store included.
        if tables and not tables & {"alembic_version", "experiments"}:
            why = "belongs to another program"
    except OSError as error:
        why = f"cannot be opened: {reason_of(error)}"
    except sqlite3.DatabaseError as error:
        why = f"cannot be used: {reason_of(error)}"
    if why:
        raise PlaceError(f"the tracking database {path} {why}; {_WAY_OUT}")
