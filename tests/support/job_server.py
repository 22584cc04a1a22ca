"""A job server that is made up, with one sweep to submit to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ringray.base import provenance
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec
from tests.support.small_spec import SMALL

URL = "http://head:8265"
PLAN = plan.build(spec.parse(SMALL))
SHORT = PLAN.digest[:12]


@dataclass
class Server:
    """Ray's job server with the parts of its client that are used; a name is taken once."""

    jobs: dict[str, SimpleNamespace] = field(default_factory=dict)
    logs: list[Any] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    before: Callable[[], None] = lambda: None  # a job is put down
    stops: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)  # of commands on the head, whose jobs end so
    asked: list[str] = field(default_factory=list)
    asked_ends: str = "SUCCEEDED"

    def put(self, id: str, status: str = "RUNNING", **more: Any) -> SimpleNamespace:
        given = {
            "submission_id": id, "status": status, "driver_exit_code": None, "error_type": None,
            "message": None,
            "metadata": {"sweep": PLAN.digest, "name": "small", "code": provenance.code_digest()},
        }  # fmt: skip
        self.jobs[id] = SimpleNamespace(**(given | more))
        return self.jobs[id]

    def list_jobs(self) -> list[SimpleNamespace]:
        return list(self.jobs.values())

    def get_job_info(self, id: str) -> SimpleNamespace:
        if id not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {id} does not exist.")
        return self.jobs[id]

    def submit_job(self, *, submission_id: str, **given: Any) -> str:
        if submission_id.startswith("ringray-ask-"):
            self.asked.append(given["entrypoint"])
            self.put(submission_id, status=self.asked_ends)
            if self.answers:
                self.logs.insert(0, [self.answers.pop(0)])
            return submission_id
        self.before()
        if submission_id in self.jobs:
            raise RuntimeError(
                "Request failed with status code 500: Traceback ...\nValueError: Job with "
                f"submission_id {submission_id} already exists. Please use a different one."
            )
        self.put(submission_id, metadata=given["metadata"], status="PENDING")
        self.sent.append({"id": submission_id, **given})
        folder = Path(given["runtime_env"]["working_dir"])
        self.files = sorted(
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        )
        return submission_id

    def delete_job(self, id: str) -> bool:
        return self.jobs.pop(id) is not None

    def stop_job(self, id: str) -> bool:
        self.stops.append(id)
        self.jobs[id].status = "STOPPED"
        return True

    async def tail_job_logs(self, id: str) -> AsyncIterator[str]:
        """One connection: texts, errors that break it, seconds of silence, or something to
        happen."""
        for entry in self.logs.pop(0):
            if isinstance(entry, float):
                await asyncio.sleep(entry)
                continue
            if isinstance(entry, Exception):
                raise entry
            if callable(entry):
                entry()
            else:
                yield entry


def ends(server: Server, status: str = "SUCCEEDED", code: int | None = 0) -> Callable[[], None]:
    def end() -> None:
        for job in server.jobs.values():
            job.status, job.driver_exit_code = status, code

    return end
