"""The files of a job: both packages as this process imports them, and the spec. No torch, no ray.

The folder has the form of a checkout (``ringray/``, ``kernels/ringray_kernels/``) whether ringray
is imported from one or was installed, so one runtime environment serves both. Nothing else of a
checkout is sent: no ``.git``, no virtual environment, no results.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ringray.base import locks, provenance
from ringray.lab.specs.model import Spec

_FOLDERS = {"ringray": "ringray", "ringray_kernels": "kernels/ringray_kernels"}
_SENT = (".py", ".yaml", ".curves", ".html", ".css", ".js")


@dataclass(frozen=True)
class Shipment:
    """A folder to send."""

    folder: Path
    spec: str  # its path in the folder, "" without one
    size: int  # bytes before compression


def _not_sent(folder: str, names: list[str]) -> list[str]:
    """Names the files that are not sent: all but Python source, its data, and folders, so that keys
    and notes beside the source stay here, and what is behind links."""

    def sent(path: Path) -> bool:
        if path.name.startswith((".", "__pycache__")) or path.is_symlink():
            return False
        return path.is_dir() or path.suffix in _SENT

    return [name for name in names if not sent(Path(folder, name))]


@contextmanager
def packed(spec: Spec | None = None) -> Iterator[Shipment]:
    """Yields a folder with this process's source and ``spec``, if any, and removes it when
    the block ends."""
    with locks.temporary_folder("ringray") as made:
        folder = made.path
        for package in provenance.packages():
            shutil.copytree(package, folder / _FOLDERS[package.name], ignore=_not_sent)
        inside = ""
        if spec is not None:
            inside = "spec/spec.yaml"
            (folder / "spec").mkdir()
            (folder / inside).write_text(spec.source, encoding="utf-8")
        state = provenance.git_state()
        if state is not None:
            (folder / provenance.PROVENANCE).write_text(json.dumps(state), encoding="utf-8")
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        yield Shipment(folder, inside, size)
