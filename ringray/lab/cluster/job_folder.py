"""The working directory of a Ray job, which Ray empties when the job has ended."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from ringray.base.errors import UserError

_PARTS = ("runtime_resources", "working_dir_files")  # of its path, in the session's folder


def check_lasting(what: str, path: Path) -> None:
    """Raises UserError if ``path`` lies in the working directory of a job."""
    parts = path.resolve().parts
    if _PARTS in pairwise(parts):
        raise UserError(
            f"{what} is {path}, in the working directory of a Ray job, which Ray empties: name an "
            "absolute path that lasts"
        )
