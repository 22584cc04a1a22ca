"""Mutants: small wrong changes of the product, each of which must make a test fail.

``mutants.yaml`` beside this file lists them. Each one is applied to a copy of the tree, and the
tests that it names run there. A mutant whose tests run into its time limit counts as noticed.

    python -m tests.mutants                  all of them
    python -m tests.mutants --quick          those that CI takes
    python -m tests.mutants --only ring-     those whose names contain ``ring-``

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_S = 240.0
AT_ONCE = 2
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that no test ran


class ListError(Exception):
    """A mutant that does not fit the tree, or a test that fails without any change."""


@dataclass(frozen=True)
class Mutant:
    """One wrong change: ``old``, which stands in ``file`` exactly once, becomes ``new``.

    ``only``: an expression that selects some of ``tests``, as pytest's ``-k``; ``quick``: CI takes
    it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
    only: str = ""
    quick: bool = False

    def mutated(self, tree: Path) -> str:
        """Returns the text of the changed file."""
        text = (tree / self.file).read_text() if (tree / self.file).is_file() else ""
        if (count := text.count(self.old)) != 1:
            raise ListError(f"{self.name}: the old text stands {count} times in {self.file}")
        return text.replace(self.old, self.new)


def read() -> list[Mutant]:
    """Reads the list of mutants."""
    text = Path(__file__).with_name("mutants.yaml").read_text()
    files = yaml.safe_load(text).items()
    return [Mutant(file=file, **entry) for file, entries in files for entry in entries]


def copy_tree(folder: Path) -> None:
    """Copies the checkout to ``folder``, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (source := REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)


def run_tests(tree: Path, tests: Sequence[str], only: str, timeout: float) -> tuple[int, str]:
    """Returns exit code and output of pytest; ``FAILED`` after ``timeout`` seconds."""
    select = ["-k", only] if only else []
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *select, *tests],
        cwd=tree, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return FAILED, "time limit"
    return process.returncode, out


def judge(mutant: Mutant) -> bool:
    """Prints whether a test notices ``mutant``, and returns it."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        (tree / mutant.file).write_text(mutant.mutated(tree))
        code, out = run_tests(tree, mutant.tests, mutant.only, TIMEOUT_S)
    if code not in (PASSED, FAILED) and "\nERROR " not in out:
        raise ListError(f"{mutant.name}: no test ran:\n{out[-2000:]}")
    print(f"{mutant.name}: {'SURVIVED' if code == PASSED else 'noticed'}", flush=True)
    return code != PASSED


def check_unchanged(mutants: Sequence[Mutant]) -> None:
    """Runs the tests that ``mutants`` name without any change.

    Raises:
        ListError: one of them fails.
    """
    by_selection: dict[str, set[str]] = {}
    for mutant in mutants:
        by_selection.setdefault(mutant.only, set()).update(mutant.tests)
    for only, tests in by_selection.items():
        code, out = run_tests(REPOSITORY, sorted(tests), only, TIMEOUT_S * (1 + len(tests)))
        if code != PASSED:
            raise ListError(f"the tests fail without any mutant:\n{out[-4000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each mutant, then the survivors."""
    parser = argparse.ArgumentParser(description="Change the product; see that tests fail.")
    parser.add_argument("--only", default="", help="only mutants whose names contain this")
    parser.add_argument("--quick", action="store_true", help="only those that CI takes")
    options = parser.parse_args(arguments)
    try:
        for mutant in read():  # the whole list fits, whichever part of it runs
            mutant.mutated(REPOSITORY)
        mutants = [
            mutant
            for mutant in read()
            if options.only in mutant.name and mutant.quick >= options.quick
        ]
        if not mutants:
            raise ListError(f"no mutant's name contains {options.only!r}")
        check_unchanged(mutants)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            noticed = list(pool.map(judge, mutants))
    except ListError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    print(f"{len(mutants)} mutants, {noticed.count(False)} survived")
    return 0 if all(noticed) else 1


if __name__ == "__main__":
    sys.exit(main())
