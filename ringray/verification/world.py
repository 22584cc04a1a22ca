"""The processes of a verification: several ranks, and one that runs alone.

Each is a fresh Python process, so that neither the caller's state nor another verification's is in
it. A request goes to all ranks at once. A process that does not answer in time is asked for the
stacks of its threads, and then ended with the others.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from ringray.verification.process import Array, Observation
from ringray.verification.target import TargetError

ALONE = -1  # rank of the process that runs alone
# Seconds that other ranks get to answer after one has failed, before they count as waiting for it.
_GRACE = 10.0
_STACKS = 2.0  # seconds that a process gets to write its stacks
_MAIN = (
    "from ringray.verification.process import main; main()"  # under its own name: pickles say so
)
_SHOWN = 2000  # characters of what a process wrote


class Refused(Exception):
    """The target raised an error on every rank: it says itself that it does not compute this."""


class HangError(TargetError):
    """The target did not end a step in time."""


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    connection: Connection[Any, Any]

    @property
    def name(self) -> str:
        return "the process alone" if self.rank == ALONE else f"rank {self.rank}"

    def written(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-_SHOWN:]


class World:
    """The processes of one target.

    ``limit``: seconds within which a process has to answer a request.
    """

    def __init__(
        self, target: str, adapter: str | None, *, ranks: int, device: str, limit: float
    ) -> None:
        self.target, self.adapter = target, adapter
        self.ranks, self.device, self.limit = ranks, device, limit
        self.facts: dict[str, Any] = {}
        self._children: dict[int, _Child] = {}
        self._cache: dict[Any, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ringray-verify-")
        self._starts = 0

    def __enter__(self) -> World:
        self._start([ALONE, *range(self.ranks)])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._end()
        self._folder.cleanup()

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
            answers = self.ask("observe", who == "alone", batch=batch, **options)
            self._cache[key] = answers[0] if who == "alone" else answers
        return self._cache[key]

    def ask(self, request: str, alone: bool = False, **arguments: Any) -> list[Any]:
        """Returns the answers of all ranks, or of the process alone, to a request.

        Raises:
            Refused: every process that was asked raised an error.
            TargetError: some did, or ended.
            HangError: some did not answer in time.
        """
        asked = [ALONE] if alone else [*range(self.ranks)]
        if not set(asked) <= set(self._children):  # they were ended after an error
            self._start(asked)
        return self._answers(asked, (request, arguments))

    def _answers(self, asked: list[int], request: tuple[str, dict[str, Any]]) -> list[Any]:
        children = [self._children[rank] for rank in asked]
        for child in children:
            try:
                child.connection.send(request)
            except OSError:
                self._fail(f"{child.name} has ended: {child.written()}")
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.limit
        while len(answers) < len(children):
            waiting = {child.connection: child for child in children if child.rank not in answers}
            ready = wait([*waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                child = waiting[cast("Any", connection)]
                try:
                    answers[child.rank] = child.connection.recv()
                except (EOFError, OSError):
                    code = child.process.wait()
                    self._fail(f"{child.name} ended with exit code {code}: {child.written()}")
                if answers[child.rank][0] == "error":
                    # The others may wait for this one in vain.
                    deadline = min(deadline, time.monotonic() + _GRACE)
        errors = {rank: answer[1:] for rank, answer in answers.items() if answer[0] == "error"}
        silent = [child for child in children if child.rank not in answers]
        if silent and not errors:
            self._hang(request[0], silent)
        if errors and (silent or len(errors) < len(children)):
            rank, (text, where) = min(errors.items())
            rest = ", ".join(child.name for child in children if child.rank not in errors)
            self._fail(f"rank {rank} raises {text}, which {rest} did not\n{where}")
        if errors:
            text, where = errors[min(errors)]
            raise Refused(f"{text}\n{where}")
        return [answers[rank][1] for rank in asked]

    def _hang(self, request: str, silent: list[_Child]) -> None:
        for child in silent:
            child.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS)
        stacks = "\n".join(f"-- {child.name}\n{child.written()}" for child in silent)
        self._end()
        names = ", ".join(child.name for child in silent)
        raise HangError(
            f"{self.target}: {names} did not end {request!r} within {self.limit:g} s; the stacks "
            f"of their threads:\n{stacks}"
        )

    def _fail(self, why: str) -> None:
        self._end()
        raise TargetError(f"{self.target}: {why}")

    def _start(self, started: list[int]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._starts += 1
        for rank in started:
            # torchrun's variables are for libraries that make their own groups.
            place, size = (0, 1) if rank == ALONE else (rank, self.ranks)
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "RANK": f"{place}", "LOCAL_RANK": f"{place}",
                "WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
            }  # fmt: skip
            # A file that is new for each start: ranks meet in it.
            store = str(Path(self._folder.name) / f"{'alone' if size == 1 else self._starts}")
            here, there = Pipe()
            log = tempfile.TemporaryFile(dir=self._folder.name)  # noqa: SIM115, until _end
            command = [
                sys.executable, "-c", _MAIN, f"{there.fileno()}", store,
                f"{rank}", f"{self.ranks}", self.target, self.adapter or "", self.device,
            ]  # fmt: skip
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=[there.fileno()],
            )  # fmt: skip
            there.close()  # so that the end of the process ends the connection
            self._children[rank] = _Child(rank, process, log, here)
        facts = dict(zip(started, self._facts(started), strict=True))
        self.facts = self.facts or facts[ALONE]
        self._check_weights(facts)

    def _facts(self, started: list[int]) -> list[dict[str, Any]]:
        try:
            return self._answers(started, ("build", {}))
        except Refused as error:
            self._fail(str(error))
            raise AssertionError from error

    def _check_weights(self, facts: dict[int, dict[str, Any]]) -> None:
        """Raises TargetError if processes have built different weights."""
        weights = {rank: fact["weights"] for rank, fact in facts.items() if rank != ALONE}
        if not self.facts["own_reference"] and ALONE in facts:
            weights[ALONE] = facts[ALONE]["weights"]
        ranks = sorted(weights)
        for rank in ranks[1:]:
            first, other = weights[ranks[0]], weights[rank]
            differing = [x for x in {**first, **other} if first.get(x) != other.get(x)]
            if differing:
                names = [self._children[x].name for x in (ranks[0], rank)]
                self._fail(
                    f"build() makes different weights in {names[0]} and {names[1]}: "
                    f"{differing[0]} and {len(differing) - 1} others; expected the same in every "
                    "process (torch.manual_seed, or weights from a file)"
                )

    def _end(self) -> None:
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()
            child.connection.close()
            child.log.close()
        self._children.clear()
