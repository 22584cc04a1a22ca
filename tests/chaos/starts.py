"""Starts of ``ringray run`` in fresh homes on a busy machine.

    python -m tests.chaos.starts --starts 20 --load 20

Busy loops beside it make the load. A run has started if it measured its trial; one that has not
must end with the exit code of a Ray that does not start, say why, and where Ray's logs are.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ringray.base.errors import ClusterError
from tests.support import place as drive
from tests.support.place import Done, tiny

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def load(loops: int) -> Iterator[None]:
    """Keeps so many busy loops running during the block."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command, start_new_session=True) for _ in range(loops)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def complaint(done: Done) -> str | None:
    """Returns what is wrong with the end of a run, None for one that started or said why not."""
    if done.code == 0:
        return None
    last = done.err.splitlines()[-1:]
    if done.code != ClusterError.exit_code:
        return f"exit code {done.code}: {last}"
    return None if last and "Ray's logs are in /" in last[0] else f"no reason: {last}"


def start() -> Done:
    """Runs one trial in a fresh home."""
    folder = Path(tempfile.mkdtemp(prefix="rh-"))
    for place in drive.place(folder):
        done = place.run("run", place.spec(tiny("start", timeout="20m")), "--no-tracking")
        place.check_nothing_is_left()
    shutil.rmtree(folder)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--load", type=int, default=20, help="busy loops")
    options = parser.parse_args()
    wrong = began = 0
    with load(options.load):
        for number in range(options.starts):
            done = start()
            why, began = complaint(done), began + (done.code == 0)
            wrong += why is not None
            again = done.err.count("starting it again")
            print(
                f"{number}: {done.seconds:.0f} s, code {done.code}, {again} more tries", flush=True
            )
            if done.code:
                print(f"   {why or done.err.splitlines()[-1]}\n{done.out}", flush=True)
    print(f"{began} of {options.starts} started, {wrong} without a reason")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
