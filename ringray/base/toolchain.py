"""The C compiler and Python headers that Triton needs at its first launch of a kernel on a GPU, to
build its launcher."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def missing() -> str | None:
    """Returns what this machine lacks and how to get it, in words; None if it has all."""
    named = os.environ.get("CC", "").split()[:1]
    if not any(map(shutil.which, named or ("gcc", "clang"))):
        tried = f"{named[0]}, as CC says" if named else "gcc or clang"
        return f"no C compiler ({tried}); on Debian and Ubuntu: apt install gcc libc6-dev"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not header.exists():
        return f"no headers of Python ({header}); on Debian and Ubuntu: apt install python3-dev"
    return None
