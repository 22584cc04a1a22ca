"""The processes of a verification: several ranks, and one that runs alone.

Each is a fresh Python process, so that neither the caller's state nor another verification's is in
it. A request goes to all ranks at once. A process that does not answer in time is asked for the
stacks of its threads, and then ended with the others; the next request starts new ones.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any, cast

import torch.distributed as dist

from ringray.base.errors import reason_of
from ringray.verification.observation import Array, Observation
from ringray.verification.target import TargetError

INSIDE = "RINGRAY_VERIFYING"  # variable of the processes of a verification: they start no other
ALONE = -1  # rank of the process that runs alone
LIMIT = 60.0  # seconds that a process gets for an answer, on a machine that starts it quickly
# That many times the seconds of the start, if those are more: a busy machine is slow at both.
_SLOW = 5
_START = 900.0  # seconds for the start itself, which runs no code of the target
# Share of a limit that other ranks get after one has failed, before they count as waiting for it.
_GRACE = 0.25
_STACKS = 10.0  # seconds, at most, that processes get to write their stacks
# The function has its own module's name: pickles say so.
_MAIN = "import sys; sys.path[:] = {}; from ringray.verification.process import main; main()"
_SHOWN = 80  # lines of what a process wrote


class Refused(Exception):
    """The target raised an error in every process: it says itself that it does not compute this."""


class FailedRank(TargetError):
    """Some ranks failed where others did not, or a process ended.

    Attributes:
        rank: the first that failed.
        details: its traceback, what it wrote, and the stacks of ranks that wait.
    """

    mistake = "fails"

    def __init__(self, what: str, rank: int, details: str) -> None:
        super().__init__(f"{what}\n{details}".rstrip())
        self.what, self.rank, self.details = what, rank, details


class HangError(FailedRank):
    """Ranks did not end a step in time; ``details`` has their stacks."""

    mistake = "hangs"


@dataclass
class _Started:
    rank: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    connection: Connection[Any, Any]

    @property
    def size(self) -> int:
        """Returns the bytes that it has written."""
        return os.fstat(self.log.fileno()).st_size

    def written(self, begin: int = 0) -> str:
        """Returns the last lines that it has written behind ``begin``, without those that say
        nothing of the target. Moves no position in the file, which is the child's, too."""
        begin = max(begin, self.size - (1 << 16))
        text = os.pread(self.log.fileno(), 1 << 16, begin).decode(errors="replace")
        # This thread of ours waits for the end of the parent.
        threads = [x for x in text.split("\n\n") if "in _follow\n" not in x]
        lines = "\n".join(threads).splitlines()
        idle = "<frozen importlib", "Extension modules: "
        return "\n".join([x for x in lines if not any(y in x for y in idle)][-_SHOWN:])

    def answer(self) -> tuple[Any, ...]:
        """Receives an answer; that of a process that has ended is its exit code."""
        try:
            answer: tuple[Any, ...] = self.connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LIMIT)  # a busy machine is slow at the end, too
            answer = "ended", f"ends with exit code {self.process.returncode}", self.written()
        return answer


def _name(rank: int) -> str:
    return "the process alone" if rank == ALONE else f"rank {rank}"


class World:
    """The processes of one target.

    ``limit``: seconds within which a process has to answer a request; None: ``LIMIT``, or more on
    a slow machine.
    """

    def __init__(
        self, target: str, adapter: str | None, *, ranks: int, device: str, limit: float | None
    ) -> None:
        self.target, self.adapter = target, adapter
        self.ranks, self.device, self.limit = ranks, device, limit
        self.facts: dict[str, Any] = {}
        self._children: dict[int, _Started] = {}
        self._cache: dict[Any, Any] = {}
        # Where ranks meet, as long as they live.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._dealt: list[int] = []  # tokens of each rank, of the last batch

    def __enter__(self) -> World:
        try:
            self._start([ALONE, *range(self.ranks)])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end([*self._children])

    def alone(self, batch: dict[str, Array], **options: Any) -> Observation:
        """Returns what one process computes of a batch; ``exact``: in fp64."""
        observation: Observation = self._cached("alone", batch, options)
        return observation

    def together(self, batch: dict[str, Array], **options: Any) -> list[Observation]:
        """Returns what each rank computes of a batch."""
        observations: list[Observation] = self._cached("together", batch, options)
        return observations

    def _cached(self, who: str, batch: dict[str, Array], options: dict[str, Any]) -> Any:
        content = tuple((name, x.tobytes(), x.shape) for name, x in sorted(batch.items()))
        key = who, content, tuple(sorted(options.items()))
        if key not in self._cache:
            try:
                if who == "together":  # told now: a step may end the processes that know it
                    self._dealt = [rows.shape[1] for rows in self.ask("shard", batch=batch)]
                answers = self.ask("step", who == "alone", batch=batch, **options)
            except (Refused, FailedRank) as error:  # another try would cost a limit again
                self._cache[key] = error
            else:
                self._cache[key] = answers[0] if who == "alone" else answers
        if isinstance(self._cache[key], Exception):
            raise self._cache[key]
        return self._cache[key]

    def ask(self, request: str, alone: bool = False, **arguments: Any) -> list[Any]:
        """Returns the answers of all ranks, or of the process alone, to a request.

        Raises:
            Refused: every process that was asked raised an error.
            FailedRank: some did, or ended.
            HangError: some did not answer in time.
        """
        asked = [ALONE] if alone else [*range(self.ranks)]
        if not set(asked) <= set(self._children):  # they were ended after a failure
            self._start(asked)
        return self._answers(asked, request, arguments, self.limit or LIMIT)

    def _answers(
        self, asked: list[int], request: str, arguments: dict[str, Any], limit: float
    ) -> list[Any]:
        children = [self._children[rank] for rank in asked]
        for child in children:
            with suppress(OSError):  # it has ended; its answer says so
                child.connection.send((request, arguments))
        answers: dict[int, tuple[Any, ...]] = {}
        deadline = time.monotonic() + limit
        while len(answers) < len(children) and time.monotonic() < deadline:
            silent = {child.connection: child for child in children if child.rank not in answers}
            # A process that has ended closes its connection, but for one that a fork of it holds.
            ended = [x for x, child in silent.items() if child.process.poll() is not None]
            for connection in ended or wait([*silent], 1):
                child = silent[cast("Any", connection)]
                answers[child.rank] = child.answer()
                if answers[child.rank][0] != "ok":
                    # The others may wait for this one in vain.
                    deadline = min(deadline, time.monotonic() + _GRACE * limit)
        if any(answers.get(rank, ("",))[0] != "ok" for rank in asked):
            self._fail(request, children, answers, limit)
        return [answers[rank][1] for rank in asked]

    def _fail(
        self,
        request: str,
        children: list[_Started],
        answers: dict[int, tuple[Any, ...]],
        limit: float,
    ) -> None:
        """Raises the error of processes that failed."""
        failed = {rank: answer for rank, answer in answers.items() if answer[0] != "ok"}
        sizes = ""
        if request == "step" and len(children) > 1 and len({*self._dealt}) > 1:
            sizes = (
                f"shard() deals {', '.join(map(str, self._dealt))} tokens to the ranks (if the "
                "model needs equal shards: UNIT, or a ValueError in shard()); "
            )
        if len(failed) == len(children) and all(x[0] == "error" for x in failed.values()):
            kind, text, where = failed[min(failed)]
            raise Refused(f"{sizes}{text}\n{where}".rstrip())
        silent = [child for child in children if child.rank not in answers]
        others = ", ".join(_name(child.rank) for child in children if child.rank not in failed)
        details = self._stacks(silent)
        self._end([child.rank for child in children])
        if not failed:
            names = ", ".join(_name(x.rank) for x in silent)
            what = f"{sizes}{names} did not end {request}() within {limit:g} s"
            raise HangError(what, silent[0].rank, details)
        # A rank that has ended takes the connections of others with it.
        rank = min(failed, key=lambda x: (failed[x][0] != "ended", x))
        kind, text, where = failed[rank]
        what = f"{sizes}{_name(rank)} {'raises ' * (kind == 'error')}{text} in {request}()"
        what += f", which {others} did not" * bool(others)
        raise FailedRank(what, rank, f"{where}\n{details}".strip())

    def _stacks(self, silent: list[_Started]) -> str:
        """Returns the stacks of the threads of processes."""
        begins = [(child, child.size) for child in silent]
        for child in silent:
            child.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS
        while time.monotonic() < deadline and any(x.size == begin for x, begin in begins):
            time.sleep(0.05)
        time.sleep(0.2)  # a stack is written in several parts
        return "\n".join(f"-- {_name(x.rank)}:\n{x.written(begin)}" for x, begin in begins)

    def _start(self, started: list[int]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        begin = time.monotonic()
        for rank in started:
            try:
                self._children[rank] = self._child(rank, port)
            except OSError as error:
                raise TargetError(f"{_name(rank)} cannot be started: {reason_of(error)}") from error
        self._first(started, "join_group", _START, port=self._store.port, start=f"{begin}")
        patience = max(LIMIT, _SLOW * (time.monotonic() - begin))
        self.limit = self.limit or patience
        # Most of an import is that of libraries, whatever the limit of a step.
        patience = max(patience, self.limit)
        self._first(started, "import_target", patience, text=self.target, adapter=self.adapter)
        built = self._first(started, "build", self.limit)
        facts = dict(zip(started, built, strict=True))
        self.facts = self.facts or facts[ALONE]
        self._check_weights(facts)

    def _first(self, started: list[int], request: str, limit: float, **arguments: Any) -> list[Any]:
        """Returns the answers to a request without which there is nothing to compare."""
        try:
            return self._answers(started, request, arguments, limit)
        except Refused as error:
            text = str(error)
            first, *rest = text.splitlines()
            if request == "import_target" and rest:  # a traceback: no refusal of ours
                hint = "expected a Python file with build(), or module:function"
                text = "\n".join([f"cannot be imported: {first}; {hint}", *rest])
            raise TargetError(text) from error

    def _child(self, rank: int, port: int) -> _Started:
        # torchrun's variables are for libraries that make their own groups; those of a torchrun
        # around this process are of other groups.
        place, size = (0, 1) if rank == ALONE else (rank, self.ranks)
        outer = {x: y for x, y in os.environ.items() if not x.startswith("TORCHELASTIC_")}
        environment = {
            **outer,
            INSIDE: "1",
            "OMP_NUM_THREADS": "1",
            "RANK": f"{place}",
            "LOCAL_RANK": f"{place}",
            "WORLD_SIZE": f"{size}",
            "LOCAL_WORLD_SIZE": f"{size}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
        }
        here, there = Pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115, until _end
        paths = [x for x in sys.path if x]  # "" is the current folder, and hides what is behind it
        command = [
            sys.executable,
            "-u",
            "-c",
            _MAIN.format(paths),
            f"{there.fileno()}",
            f"{os.getpid()}",
            f"{rank}",
            self.device,
        ]
        # A session of its own: Ctrl-C is the parent's, and what the target starts ends with it.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
        there.close()  # so that the end of the process ends the connection
        return _Started(rank, process, log, here)

    def _check_weights(self, facts: dict[int, dict[str, Any]]) -> None:
        """Raises TargetError if processes have built different weights."""
        weights = {rank: fact["weights"] for rank, fact in facts.items()}
        if self.facts["own_reference"]:
            weights.pop(ALONE, None)
        first = min(weights, default=ALONE)
        for rank in weights:
            names = weights[first] | weights[rank]
            wrong = [x for x in names if weights[first].get(x) != weights[rank].get(x)]
            if wrong:
                raise TargetError(
                    f"build() makes different weights in {_name(first)} and {_name(rank)}: "
                    f"{wrong[0]} and {len(wrong) - 1} others of {len(names)} differ; expected the "
                    "same in every process (torch.manual_seed, or weights from a file)"
                )

    def _end(self, ranks: list[int]) -> None:
        for rank in ranks:
            child = self._children.pop(rank)
            with suppress(OSError):  # it has ended with all that it started
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            child.connection.close()
            child.log.close()
