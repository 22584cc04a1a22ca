"""Fixtures of all tests, which keep the home of the person who runs them untouched; turns.

Tests marked ``rotating(n)`` are cases of one large set. With ``RINGRAY_TURN`` (a whole number) set,
one in ``n`` of them runs, a different one each turn; without it all run. All others that are marked
``slow`` or ``chaos`` are one set, of which each turn takes every third one.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.place import Place

TURN = os.environ.get("RINGRAY_TURN")
SLOW_TURNS = 3

# Before anything imports triton: without a GPU its kernels run in the interpreter.
NO_DEVICES = not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
if NO_DEVICES:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Asks PyTorch for a GPU before ``-m gpu``: some containers hide the devices by other names."""
    if NO_DEVICES and config.getoption("markexpr") == "gpu":
        import torch

        if torch.cuda.is_available():
            del os.environ["TRITON_INTERPRET"]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fails ``-m gpu`` where no test ran: it would be green without a GPU."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.getoption("markexpr") != "gpu" or config.option.collectonly or reporter is None:
        return
    if exitstatus == 0 and not reporter.stats.get("passed"):
        reporter.write_line("no gpu test ran: all were skipped", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files without gpu tests out of ``-m gpu``: a GPU machine may lack their imports."""
    if config.getoption("markexpr") != "gpu":
        return None
    files = [collection_path] if collection_path.match("test_*.py") else []
    files += collection_path.rglob("test_*.py")
    return not any("mark.gpu" in file.read_text("utf-8") for file in files) or None


def pytest_report_header() -> str:
    if TURN is None:
        return "RINGRAY_TURN is not set: all rotating tests"
    return f"RINGRAY_TURN={TURN}: a part of the rotating tests"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the rotating tests whose turn it is not."""
    if TURN is None:
        return
    places = Counter[str]()
    resting = []
    for item in items:
        if mark := item.get_closest_marker("rotating"):
            among, turns = item.nodeid.partition("[")[0], mark.args[0]
        elif item.get_closest_marker("slow") or item.get_closest_marker("chaos"):
            among, turns = "slow", SLOW_TURNS
        else:
            continue
        if (places[among] - int(TURN)) % turns:
            resting.append(item)
        places[among] += 1
    config.hook.pytest_deselected(items=resting)
    items[:] = [item for item in items if item not in set(resting)]


@pytest.fixture(scope="session", autouse=True)
def ringray_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A private $RINGRAY_HOME for the session, without the caller's tracking server or cluster."""
    home = tmp_path_factory.mktemp("ringray-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGRAY_HOME", str(home))
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


@pytest.fixture(autouse=True)
def interpreter_kept() -> Iterator[None]:
    """No test leaves Triton's interpreter switched for the processes of the next."""
    before = os.environ.get("TRITON_INTERPRET")
    yield
    after = os.environ.get("TRITON_INTERPRET")
    if before is None:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = before
    assert after == before, f"TRITON_INTERPRET is {after!r} after the test, {before!r} before it"
