"""``python -m ringray`` is the command ``ringray``."""

from __future__ import annotations

from ringray.cli import entry

if __name__ == "__main__":
    entry()
