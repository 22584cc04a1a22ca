"""Where a sweep is tracked: the MLflow URI, and whether it can be used at all.

The checks are quick and made before any actor starts; they import no MLflow.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
import sys
from pathlib import Path
from urllib.parse import urlsplit

from ringray.base import private_files
from ringray.base.errors import PlaceError
from ringray.base.redaction import has_password, without_credentials

PROBE_S = 3.0
_DATABASES = ("postgresql", "mysql", "mssql")
_SECRETS = {
    "http": (
        "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_TRACKING_CLIENT_CERT_PATH",
    ),
    "postgresql": ("PGPASSWORD",),
    "mysql": ("MYSQL_PWD",),
}  # fmt: skip
_WAY_OUT = (
    "set tracking.uri in the spec or MLFLOW_TRACKING_URI, or tracking.enabled: false to do without"
)


def resolve_uri(given: str | None) -> str:
    """The spec's URI, else ``$MLFLOW_TRACKING_URI``, else sqlite under the home folder.

    A relative sqlite path is made absolute: the command that opens it works from anywhere.

    Raises:
        PlaceError: a spec may not name that place; the environment may.
    """
    if given:
        _check_given(given.strip())
    uri = (given or os.environ.get("MLFLOW_TRACKING_URI") or "").strip()
    if not uri:
        return f"sqlite:///{private_files.create_home() / 'mlflow.db'}"
    path = sqlite_path(uri)
    return uri if path is None else f"sqlite:///{path}"


def sqlite_path(uri: str) -> Path | None:
    """The absolute path of a sqlite URI with a file; None for any other."""
    scheme, separator, rest = uri.partition(":///")
    if scheme.lower() != "sqlite" or not separator or rest in ("", ":memory:"):
        return None
    return Path(rest).absolute()


def _check_given(uri: str) -> None:
    """A spec may come from somebody else: it names no file outside of the working directory and the
    home folder, no options of database drivers (some load libraries), and nobody to whom the
    secrets of the environment would be sent."""
    _check_kind(uri)
    shown, path = without_credentials(uri), sqlite_path(uri)
    allowed = "the environment may: set MLFLOW_TRACKING_URI"
    if path is not None:
        inside = (Path.cwd(), private_files.home())
        if not any(path.resolve().is_relative_to(one.resolve()) for one in inside):
            raise PlaceError(
                f"tracking.uri {shown!r}: {path} lies outside of the working directory and of "
                f"RINGRAY_HOME, where a spec names no file; {allowed}"
            )
    server = uri.lower().startswith(("http:", "https:"))
    if not server and "?" in uri:
        raise PlaceError(
            f"tracking.uri {shown!r}: a spec gives no options of a database; {allowed}"
        )
    secrets = _environment_secrets("http" if server else uri.partition(":")[0].lower())
    if secrets and _origin(uri) != _origin(os.environ.get("MLFLOW_TRACKING_URI", "")):
        raise PlaceError(
            f"tracking.uri {shown!r} would be sent {secrets}, which is for whom "
            "MLFLOW_TRACKING_URI names; set that to the same server, or take the secret away"
        )


def _environment_secrets(scheme: str) -> str | None:
    """What of this user's MLflow and database clients send to any server, or None."""
    found = [name for name in _SECRETS.get(scheme.partition("+")[0], ()) if os.environ.get(name)]
    if scheme == "http" and (Path.home() / ".mlflow" / "credentials").exists():
        found.append("~/.mlflow/credentials")
    return found[0] if found else None


def _origin(uri: str) -> tuple[str, str | None, int | None]:
    """Who is spoken to."""
    try:
        parts = urlsplit(uri)
        return parts.scheme, parts.hostname, parts.port
    except ValueError:
        return "", None, None


def artifact_root(uri: str) -> str | None:
    """Where a new experiment keeps its files: the server decides; a database alone has no place for
    them, and then it is home."""
    if uri.lower().startswith(("http:", "https:")):
        return None
    return str(private_files.folder(private_files.create_home() / "artifacts"))


def check(uri: str, seconds: float | None = None) -> None:
    """Raises PlaceError when the URI is malformed or nobody answers there in so many seconds, 3 if
    nothing else is said."""
    _check_kind(uri)
    if uri.lower().startswith(("http:", "https:")):
        shown = without_credentials(uri)
        _check_server(uri, shown, PROBE_S if seconds is None else seconds)
    elif path := sqlite_path(uri):
        _check_file(path)


def _check_kind(uri: str) -> None:
    """Raises PlaceError when MLflow would take the URI for something else than it looks like."""
    scheme, shown = uri.partition(":")[0].lower(), without_credentials(uri)
    if scheme == "sqlite":
        if sqlite_path(uri) is None:
            raise PlaceError(
                f"tracking URI {shown!r} names no file: expected sqlite:///PATH; {_WAY_OUT}"
            )
        return
    server = scheme in ("http", "https")
    if not server and (scheme.partition("+")[0] not in _DATABASES or "://" not in uri):
        raise PlaceError(
            f"tracking URI {shown!r} is of no known kind: expected http://HOST:PORT, https://..., "
            f"sqlite:///PATH, {'://..., '.join(_DATABASES)}://... (MLflow has given up plain "
            f"folders); {_WAY_OUT}"
        )


def ui_command(uri: str, experiment_id: str = "", run_id: str = "") -> str:
    """What opens the sweep in a browser: a shell command, or the address of the server."""
    if uri.lower().startswith(("http:", "https:")):
        page = f"/#/experiments/{experiment_id}/runs/{run_id}" if run_id else ""
        return without_credentials(uri).rstrip("/") + page
    # A command with *** in it would not work, and a password does not belong on a screen.
    place = '"$MLFLOW_TRACKING_URI"' if has_password(uri) else shlex.quote(uri)
    return f"{_mlflow_program()} ui --backend-store-uri {place} --host 127.0.0.1"


def cannot_be_used(uri: str, why: str) -> PlaceError:
    """The error for a place that passed the checks and then failed."""
    return PlaceError(f"tracking at {without_credentials(uri)} cannot be used: {why}; {_WAY_OUT}")


def _check_server(uri: str, shown: str, seconds: float) -> None:
    # Imported here: the default place is a file, and ssl takes longer than the rest together.
    import ssl
    import urllib.error
    import urllib.request

    parts = urlsplit(uri)
    try:
        parts.port  # noqa: B018  it raises
    except ValueError as error:
        raise PlaceError(f"tracking URI {shown!r}: {error}; {_WAY_OUT}") from error
    if not parts.hostname:
        raise PlaceError(f"tracking URI {shown!r} names no host; {_WAY_OUT}")
    netloc = parts.netloc.rpartition("@")[2]
    health = parts._replace(netloc=netloc, path=f"{parts.path.rstrip('/')}/health", query="")
    try:
        with urllib.request.urlopen(health.geturl(), timeout=seconds):
            return
    except urllib.error.HTTPError as error:
        # Below 500 somebody answered; proxies and managed servers may know no /health.
        if error.code < 500:
            return
        why = f"it answers {error.code} {error.reason}"
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            return  # MLflow has its own settings for certificates and will judge
        why = getattr(error.reason, "strerror", None) or str(error.reason)
    except (OSError, ValueError) as error:
        why = str(error)
    raise PlaceError(
        f"no MLflow server answers at {shown}: {why}; start it "
        f"(`mlflow server --host 127.0.0.1 --port {parts.port or 5000}`) or {_WAY_OUT}"
    )


def _check_file(path: Path) -> None:
    def wrong(why: str) -> PlaceError:
        return PlaceError(f"the tracking database {path} {why}; {_WAY_OUT}")

    try:
        private_files.above(path)
        if path.is_dir():
            raise wrong("is a directory: name a file in it")
        # Proves that it can be written, and gives a new one its mode.
        private_files.database(path)
        if not os.access(path.parent, os.W_OK):
            raise wrong("lies in a folder that is not writable")
    except OSError as error:
        raise wrong(f"cannot be opened: {(error.strerror or str(error)).lower()}") from error
    try:
        db = sqlite3.connect(path, timeout=PROBE_S, isolation_level=None)
        try:
            db.execute("BEGIN IMMEDIATE")
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            db.execute("ROLLBACK")
        finally:
            db.close()
    except sqlite3.DatabaseError as error:
        raise wrong(f"cannot be used: {error}") from error
    # MLflow would add its tables to any database, ringray's own store included.
    if tables and "alembic_version" not in tables:
        raise wrong("belongs to another program")


def _mlflow_program() -> str:
    """``mlflow`` where the shell would find ours, else its path."""
    ours = Path(sys.executable).parent / "mlflow"
    found = shutil.which("mlflow")
    if not ours.exists() or (found and Path(found).resolve() == ours.resolve()):
        return "mlflow"
    here = Path.cwd()
    return shlex.quote(str(ours.relative_to(here) if ours.is_relative_to(here) else ours))
