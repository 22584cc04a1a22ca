"""Fixtures of all tests, which keep the home of the person who runs them untouched; counts by mark.

A test belongs to every commit (`make test`, or `make chaos` if it is marked ``slow`` or ``chaos``),
or to `make exhaustive` alone if it is marked so. Each run says how many tests of each mark ran, and
``--least MARK=N`` fails a run of fewer.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import programs

if TYPE_CHECKING:  # it imports what a GPU machine may lack
    from tests.support.place import Place

# Before anything imports triton: without a GPU its kernels run in the interpreter.
NO_DEVICES = not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
if NO_DEVICES:
    os.environ["TRITON_INTERPRET"] = "1"

SPEEDS = ("slow", "chaos", "exhaustive", "gpu")  # a test with none of them is quick
# Those that take longest come first, so that no worker waits for another's last file.
LONGEST = (
    "tests/attention/test_ring_attention.py",
    "tests/contracts/test_transports.py",
    "tests/lab/driver/test_driver.py",
    "tests/training/test_training.py",
    "tests/kernels/test_compiled.py",
    "tests/contracts/test_backends.py",
    "tests/lab/tracking/test_tracking.py",
    "tests/lab/tracking/test_wandb.py",
    "tests/test_examples.py",
    "tests/lab/kinds/test_train.py",
    "tests/chaos/test_faults.py",
    "tests/chaos/test_hosts.py",
    "tests/chaos/test_jobs.py",
    "tests/chaos/test_metrics.py",
    "tests/browser/test_pages.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--least", action="append", default=[], metavar="MARK=N",
        help="fail if fewer tests with this mark ran; `quick`: without any of the others",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Asks PyTorch for a GPU before ``-m gpu``: some containers hide the devices by other names."""
    if config.getoption("markexpr") == "gpu":
        config.option.least = config.option.least or ["gpu=1"]
        if NO_DEVICES:
            import torch

            if torch.cuda.is_available():
                del os.environ["TRITON_INTERPRET"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files out that have no test with a mark that ``-m`` wants: importing them takes
    seconds, and a GPU machine may lack what they import."""
    expression = re.sub(r"not \w+", "", config.getoption("markexpr"))
    wanted = [rf"mark\.{mark}\b" for mark in SPEEDS if mark in expression]
    if not wanted:
        return None
    if "exhaustive" in expression:
        wanted.append(r"\bexhaustive\(")  # of tests.support
    if "gpu" in expression:
        wanted.append(r"\bON_GPU\b")  # likewise
    files = [collection_path] if collection_path.match("test_*.py") else []
    files += collection_path.rglob("test_*.py")
    marks = re.compile("|".join(wanted))
    return not any(marks.search(file.read_text("utf-8")) for file in files) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Notes each test's marks for the summary, and puts the longest files first."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & {*SPEEDS, *programs.NEEDED}
        speeds = marks if marks & {*SPEEDS} else {*marks, "quick"}
        item.user_properties += [("mark", mark) for mark in speeds]
    order = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests whose programs are missing."""
    for mark in programs.NEEDED:
        if item.get_closest_marker(mark) and (reason := programs.missing(mark)):
            pytest.skip(reason)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Says how many tests of each mark ran; fails where they are fewer than ``--least`` wants."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.collectonly:
        return

    def counted(*outcomes: str) -> Counter[str]:
        reports = [report for outcome in outcomes for report in reporter.stats.get(outcome, [])]
        properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
        return Counter(mark for name, mark in properties if name == "mark")

    ran, skipped = counted("passed", "failed"), counted("skipped")
    reporter.write_line("")
    reporter.write_line("tests that ran: " + ", ".join(f"{n} {mark}" for mark, n in ran.items()))
    for mark in programs.NEEDED:
        if skipped[mark]:
            reporter.write_line(f"SKIPPED: {skipped[mark]} tests marked {mark}", yellow=True)
    for wanted in config.option.least:
        mark, _, least = wanted.partition("=")
        count = ran[mark] + (skipped[mark] if mark in programs.NEEDED else 0)
        if count < int(least):
            reporter.write_line(f"{count} {mark} tests, expected {least} at least", red=True)
            session.exitstatus = exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def ringray_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A private $RINGRAY_HOME and compiler's cache, without the caller's server or cluster."""
    home = tmp_path_factory.mktemp("ringray-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGRAY_HOME", str(home))
        # Graphs that another version left there have its shapes of the operators' results.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        yield home
    assert os.environ.get("RINGRAY_HOME") != str(home)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A home in which a test runs the command."""
    from tests.support import place as drive  # with what a machine for the kernels lacks

    yield from drive.place(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """No signal is ignored because the tests run under ``nohup`` or in the background."""
    terminal = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.getsignal(number) for number in terminal}
    for number, handler in terminal.items():
        if before[number] == signal.SIG_IGN:
            signal.signal(number, handler)
    yield
    for number, was in before.items():
        signal.signal(number, was)


@pytest.fixture(scope="module", autouse=True)
def compiler_forgets() -> Iterator[None]:
    """No file leaves graphs to the next: torch.compile makes eight of a function and then fails."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """No test switches Triton's interpreter or Ray's token mode, which a command sets for a given
    token, for the next."""
    before = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "RAY_AUTH_MODE")}
    yield
    after = os.environ.get("TRITON_INTERPRET")
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    assert after == before["TRITON_INTERPRET"], f"TRITON_INTERPRET is {after!r} after the test"
