"""``python -m ringray`` is the command ``ringray``."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - source that came with a job was never installed
    here = ".".join(map(str, sys.version_info[:3]))
    print(f"ringray: error: this is Python {here}, ringray needs 3.11 to 3.13", file=sys.stderr)
    sys.exit(2)

from ringray.lab.cli import entry

if __name__ == "__main__":
    entry()
