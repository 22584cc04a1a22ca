"""Fixtures of all tests, which keep the home of the person who runs them untouched; turns.

Tests marked ``rotating(n)`` are cases of one large set. With ``RINGRAY_TURN`` (a whole number) set,
one in ``n`` of them runs, other ones each turn, spread over the values of their parameters; without
it all run. The others of a file that are marked ``slow`` or ``chaos`` are one set, of which a turn
takes a fifth. CI takes turn 0. No turn has those that are marked ``exhaustive``.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.place import Place

TURN = os.environ.get("RINGRAY_TURN")
SLOW_TURNS = 5

# Before anything imports triton: without a GPU its kernels run in the interpreter.
NO_DEVICES = not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
if NO_DEVICES:
    os.environ["TRITON_INTERPRET"] = "1"


# Marks of which a selection wants at least one: files without them need not be imported, which
# takes seconds, and a GPU machine may lack what they import.
WANTED = {"gpu": ["gpu"], "(slow or chaos) and not gpu": ["slow", "chaos"]}


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
    """Leaves files out that have no test with a mark that ``-m`` wants."""
    wanted = WANTED.get(config.getoption("markexpr"))
    if wanted is None:
        return None
    files = [collection_path] if collection_path.match("test_*.py") else []
    files += collection_path.rglob("test_*.py")
    marks = re.compile(rf"mark\.({'|'.join(wanted)})\b")
    return not any(marks.search(file.read_text("utf-8")) for file in files) or None


def pytest_report_header() -> str:
    if TURN is None:
        return "RINGRAY_TURN is not set: all rotating tests"
    return f"RINGRAY_TURN={TURN}: a part of the rotating tests"


def large_set(item: pytest.Item) -> tuple[str, int]:
    """Returns the set that ``item`` is a case of, and how many turns the set takes."""
    if mark := item.get_closest_marker("rotating"):
        # Of each backend as many, as most of them skip where there is no GPU.
        backend = item.callspec.params.get("backend", "") if hasattr(item, "callspec") else ""
        return f"{item.nodeid.partition('[')[0]} {backend}", mark.args[0]
    if item.get_closest_marker("slow") or item.get_closest_marker("chaos"):
        return item.nodeid.partition("::")[0], SLOW_TURNS
    return item.nodeid, 1


def spread(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the cases in an order whose parts have each value of a parameter about as often."""
    values = {
        item: list(item.callspec.params.items()) for item in cases if hasattr(item, "callspec")
    }
    # No luck of the order in which cases are written; the same for each commit.
    waiting = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
    counts, order = Counter[str](), []
    while waiting:
        following = min(waiting, key=lambda item: sum(counts[str(v)] for v in values.get(item, [])))
        waiting.remove(following)
        order.append(following)
        counts.update(map(str, values.get(following, [])))
    return order


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the rotating tests whose turn it is not."""
    if TURN is None:
        return
    sets = defaultdict[tuple[str, int], list[pytest.Item]](list)
    resting = {item for item in items if item.get_closest_marker("exhaustive")}
    for item in items:
        if item not in resting:
            sets[large_set(item)].append(item)
    for (_, turns), cases in sets.items():
        part = -(-len(cases) // turns)
        first = int(TURN) % turns * part
        resting |= {*cases} - {*spread(cases)[first : first + part]} if turns > 1 else set()
    config.hook.pytest_deselected(items=[item for item in items if item in resting])
    items[:] = [item for item in items if item not in resting]


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
