"""Files that a user names for output, opened to write: no link is followed."""

from __future__ import annotations

import os
import re
from pathlib import Path


def opened(path: Path, flags: int) -> int:
    """Opens a file to write it, and returns its number. No link is followed but those of the
    system, such as /dev/stdout. A pipe is opened when its reader has come.

    Raises:
        OSError: it cannot be written.
    """
    flags |= 0 if is_stream(path) else os.O_NOFOLLOW
    return os.open(path, flags | os.O_WRONLY | os.O_CREAT, 0o666)


def is_stream(path: Path) -> bool:
    """Tells whether a path names a stream or a device by the system's own names."""
    return re.fullmatch(r"/dev(/fd)?|/proc/[^/]+/fd", str(path.parent)) is not None


def write(file: int, data: bytes) -> None:
    """Writes all of ``data`` to an open file; raises OSError if that is impossible."""
    while data:
        data = data[os.write(file, data) :]
