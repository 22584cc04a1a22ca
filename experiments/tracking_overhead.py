"""What tracking over HTTP adds to a sweep: the same sweep with it and without, in turn.

    python experiments/tracking_overhead.py --rounds 5 --trials 100

Each round runs the whole command twice, from its start to its exit, in an order that alternates;
the ratio is taken round by round and its median reported. An `mlflow server` on sqlite is started
on this machine, unless ``--uri`` names one; then its own work is done elsewhere, as on a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """An `mlflow server` for as long as the context lasts; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1",
                "--port", str(port), "--workers", "1",
                "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
                "--artifacts-destination", str(folder / "files"),
            ],
            stdout=log, stderr=log, cwd=folder, start_new_session=True,
            env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
        )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while not _answers(uri):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"no server: {(folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield uri
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def _answers(uri: str) -> bool:
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def run(spec: dict[str, Any], tracking: dict[str, Any], folder: Path) -> float:
    """Seconds of one `ringray run` of ``spec`` in a home of its own."""
    home = Path(tempfile.mkdtemp(dir=folder))
    path = home / "spec.yaml"
    path.write_text(yaml.safe_dump(spec | {"tracking": tracking}))
    environment = os.environ | {
        "RINGRAY_HOME": str(home),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    }
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "ringray", "run", str(path)],
        env=environment, cwd=home, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    if tracking["enabled"] and "not in MLflow" in done.stdout + done.stderr:
        raise SystemExit(f"it is not all in MLflow: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return seconds


def main() -> int:
    """Prints a line per round and the medians, as JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", type=Path, default=ROOT / "experiments" / "overhead.yaml")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=100, help="replicas of the spec's point")
    parser.add_argument("--seq-len", type=int, help="instead of the spec's: how much a trial does")
    parser.add_argument("--repeats", type=int, help="instead of the spec's")
    parser.add_argument("--uri", help="a running server, instead of one of our own")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    spec = yaml.safe_load(given.spec.read_text())
    spec["measure"]["replicas"] = given.trials
    if given.seq_len:
        spec["problem"]["seq_len"] = given.seq_len
    if given.repeats:
        spec["measure"]["repeats"] = given.repeats
    with tempfile.TemporaryDirectory(prefix="ringray-overhead-") as name:
        folder = Path(name)
        if given.uri:
            rounds = _rounds(spec, given.uri, given.rounds, folder)
        else:
            with server(folder) as uri:
                rounds = _rounds(spec, uri, given.rounds, folder)
    ratio = statistics.median(tracked / plain for tracked, plain in rounds)
    tracked, plain = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(
        f"medians of {given.rounds}: {tracked:.2f} s tracked, {plain:.2f} s not, "
        f"ratio round by round {ratio:.3f}"
    )
    if given.json:
        found = {"trials": given.trials, "spec": spec, "seconds": rounds, "ratio": ratio}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _rounds(spec: dict[str, Any], uri: str, count: int, folder: Path) -> list[tuple[float, float]]:
    """Seconds with tracking and without, by round; one more round warms the caches."""
    rounds = []
    for number in range(count + 1):
        # Another seed is another sweep: MLflow has none of it yet.
        one = spec | {"measure": spec["measure"] | {"seed": number}}
        seconds = {}
        for tracked in (True, False) if number % 2 else (False, True):
            tracking = {"enabled": tracked, **({"uri": uri} if tracked else {})}
            seconds[tracked] = run(one, tracking, folder)
        load = os.getloadavg()[0]
        if number:
            rounds.append((seconds[True], seconds[False]))
            print(
                f"round {number}: {seconds[True]:.2f} s tracked, {seconds[False]:.2f} s not, "
                f"ratio {seconds[True] / seconds[False]:.3f}, load {load:.1f}",
                flush=True,
            )
    return rounds


if __name__ == "__main__":
    sys.exit(main())
