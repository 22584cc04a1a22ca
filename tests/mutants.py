"""Mutants: small wrong changes of the product, each of which must make a test fail.

``mutants.yaml`` beside this file lists them. Each one is applied to a private copy of the tree, the
tests that it names run there, and the mutants that no test notices are printed. A mutant whose
tests run into its time limit counts as noticed.

    python -m tests.mutants                  all of them
    python -m tests.mutants --only ring-     those whose names contain ``ring-``
    python -m tests.mutants --slice 3/8      every eighth one, beginning with the third

Exit codes: 0 all noticed; 1 some survived; 2 the list does not fit the tree, or a named test fails
without any change.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutants.yaml")
TIMEOUT_S = 240.0
AT_ONCE = 2
FAILED, NO_SUCH_TEST, NOTHING_SELECTED = 1, 4, 5  # exit codes of pytest


class ListError(Exception):
    """A mutant that does not fit the tree, or a test that fails without any change."""


@dataclass(frozen=True)
class Mutant:
    """One wrong change: ``old``, which stands in ``file`` exactly once, becomes ``new``.

    ``only``: an expression that selects some of ``tests``, as pytest's ``-k``.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""
    timeout: float = TIMEOUT_S

    def mutated(self, tree: Path) -> str:
        """Returns the text of the changed file."""
        path = tree / self.file
        if not path.is_file():
            raise ListError(f"{self.name}: no file {self.file}")
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ListError(f"{self.name}: the old text stands {count} times in {self.file}")
        if self.old == self.new:
            raise ListError(f"{self.name}: old and new text are the same")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """The result of one mutant. ``notice``: the first failed test, empty if it survived."""

    mutant: Mutant
    notice: str
    seconds: float = field(compare=False)


class Tree:
    """A private copy of the checkout, without what git ignores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=REPOSITORY, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (source := REPOSITORY / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder / name)
        self._changes = 0

    def verdict(self, mutant: Mutant) -> Verdict:
        """Applies the mutant, runs its tests and takes it back."""
        path, text = self.folder / mutant.file, mutant.mutated(self.folder)
        original, stat = path.read_bytes(), path.stat()
        began = time.monotonic()
        path.write_text(text)
        # Python recompiles a module when its time or size differ; the size may be the same.
        self._changes += 1
        os.utime(path, (stat.st_atime, stat.st_mtime + self._changes))
        try:
            code, out = self.run(mutant.tests, mutant.only, mutant.timeout)
        finally:
            path.write_bytes(original)
            os.utime(path, (stat.st_atime, stat.st_mtime))
        if code in (NO_SUCH_TEST, NOTHING_SELECTED):
            raise ListError(f"{mutant.name}: no such test:\n{out[-2000:]}")
        return Verdict(mutant, _noticed(code, out), time.monotonic() - began)

    def run(
        self, tests: Sequence[str], only: str, timeout: float, workers: int = 0
    ) -> tuple[int | None, str]:
        """Returns exit code and output of pytest; no code after ``timeout`` seconds."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "-n", str(workers), "--dist", "loadfile"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *(["-k", only] if only else []), *tests],
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        return process.returncode, out


def _noticed(code: int | None, out: str) -> str:
    if code == 0:
        return ""
    if code is None:
        return "time limit"
    failed = [line for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" - ")[0].split(" ", 1)[1] if failed else f"pytest exited with {code}"


def read(path: Path = LIST) -> list[Mutant]:
    """Reads all mutants of a list.

    Raises:
        ListError: a name stands twice.
    """
    entries: list[dict[str, Any]] = yaml.safe_load(path.read_text())
    found = [Mutant(**(entry | {"tests": tuple(entry["tests"])})) for entry in entries]
    names = [one.name for one in found]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ListError(f"names that stand twice: {', '.join(sorted(doubled))}")
    return found


def judged(mutants: Sequence[Mutant]) -> Iterator[Verdict]:
    """Yields the verdict on each mutant in the order of the list, ``AT_ONCE`` at a time."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for at in range(AT_ONCE):
            trees.put(Tree(Path(folder) / str(at)))

        def judge(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                return tree.verdict(mutant)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                yield from pool.map(judge, mutants)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def check_unchanged(mutants: Sequence[Mutant]) -> None:
    """Runs the tests that ``mutants`` name without any change.

    Raises:
        ListError: one of them fails.
    """
    tests: dict[str, set[str]] = {}
    for one in mutants:
        tests.setdefault(one.only, set()).update(one.tests)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(Path(folder))
        for only, some in tests.items():
            code, out = tree.run(sorted(some), only, TIMEOUT_S * (1 + len(some)), AT_ONCE)
            if code != 0:
                raise ListError(f"the tests fail without any mutant:\n{out[-4000:]}")


def _slice(text: str) -> tuple[int, int]:
    which, _, count = text.partition("/")
    if not (which.isdigit() and count.isdigit() and 1 <= int(which) <= int(count)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected K/N with 1 <= K <= N")
    return int(which), int(count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each mutant, then the survivors."""
    options = argparse.ArgumentParser(description="Change the product; see that tests fail.")
    options.add_argument("--only", default="", help="only mutants whose names contain this")
    options.add_argument(
        "--slice", type=_slice, default=(1, 1), help="K/N: every N-th, from the K-th"
    )
    given = options.parse_args(arguments)
    try:
        which, count = given.slice
        mutants = [one for one in read() if given.only in one.name][which - 1 :: count]
        for one in read():  # the whole list fits, whichever part of it runs
            one.mutated(REPOSITORY)
        if not mutants:
            raise ListError(f"no mutant's name contains {given.only!r}")
        check_unchanged(mutants)
        survivors = []
        for at, verdict in enumerate(judged(mutants), 1):
            told = f"noticed by {verdict.notice}" if verdict.notice else "SURVIVED"
            name = verdict.mutant.name
            print(f"[{at}/{len(mutants)}] {name}: {told} ({verdict.seconds:.0f} s)", flush=True)
            if not verdict.notice:
                survivors.append(verdict.mutant)
    except ListError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    print(f"{len(mutants)} mutants, {len(survivors)} survived")
    for one in survivors:
        print(f"  {one.name}: {one.file}: {one.old.strip()!r} -> {one.new.strip()!r}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
