"""Commands that read the store of the sweep that the campaign disturbs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.chaos.beside import TURN_S
from tests.support.place import Place

RESULTS = "import sys; from ringray.lab import results; print(len(results(sys.argv[1])))"
READERS: dict[str, list[str]] = {
    "list": ["-m", "ringray", "list"],
    "status": ["-m", "ringray", "status", "SWEEP", "--all", "--history"],
    "report": ["-m", "ringray", "report", "SWEEP", "-o", "-"],
    "compare": ["-m", "ringray", "compare", "SWEEP", "SWEEP"],
    "watch": ["-m", "ringray", "watch", "SWEEP", "--lines"],
    "results": ["-c", RESULTS, "SWEEP"],
}


class Reader:
    """One command of READERS, twice: on the store of a place, and on a copy in ``folder``, of which
    it must not change a byte."""

    def __init__(self, place: Place, folder: Path, name: str, sweep: str) -> None:
        self._name, self._folder, self._copy = name, folder, folder / "copy"
        self._before = files(self._copy)
        self._words = [word.replace("SWEEP", sweep) for word in READERS[name]]
        self._begun = {home: self._start(place, home) for home in (place.home, self._copy)}

    def _start(self, place: Place, home: Path) -> subprocess.Popen[bytes]:
        # Caches of libraries belong to the user's home, not to ringray's.
        own = {"HOME": str(self._folder), "RINGRAY_HOME": str(home)}
        with self._log(home).open("wb") as file:
            return subprocess.Popen(
                [sys.executable, *self._words], stdout=file, stderr=subprocess.STDOUT,
                cwd=self._folder, env=place.environment | own, start_new_session=True,
            )  # fmt: skip

    def _log(self, home: Path) -> Path:
        return self._folder / f"{home.name}.log"

    def check(self, damaged: bool) -> None:
        """Waits for both ends. ``damaged``: whether the store was so meanwhile, which is told."""
        for home, process in self._begun.items():
            endless = self._name == "watch" and home == self._copy  # no driver goes on with that
            if endless:
                process.send_signal(signal.SIGINT)
            code, expected = process.wait(TURN_S), {0, *[130] * endless, *[2] * damaged}
            said = self._log(home).read_text()
            assert "Traceback" not in said, said[-3000:]
            assert code in expected, (self._words, home, code, said[-3000:])
        assert files(self._copy) == self._before, self._words

    def close(self) -> None:
        """Ends what is left of them."""
        for process in self._begun.values():
            process.kill()
            process.wait()


def files(folder: Path) -> dict[Path, tuple[int, int, bytes]]:
    """Returns mode, time of change and content of all that lies in a folder."""
    return {
        path: (now.st_mode, now.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (folder, *folder.rglob("*"))
        for now in [path.lstat()]
    }
