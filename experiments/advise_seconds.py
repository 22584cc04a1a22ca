"""Seconds that ``ringray advise`` takes to answer, by model and fleet, on one core.

    python experiments/advise_seconds.py

Prints seconds of the processor in a process of its own, its start included: on a machine that does
nothing else as many as the clock's.
"""

from __future__ import annotations

import resource
import subprocess
import sys

from ringray.lab.report import tables

MODELS = ("8b", "405b", "gpt-oss-120b", "qwen3-30b-a3b", "deepseek-v3")
FLEETS = ("h200:8x8", "h200:512x8")
CONTEXTS = ("128k", "1M")


def seconds(model: str, fleet: str, context: str) -> float:
    """Returns the seconds of one answer; that nothing fits is one, too."""
    asked = ["advise", model, "--on", fleet, "--context", context, "--json", "-"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "ringray", *asked], capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (0, 2), done.stderr.decode()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints the table."""
    heads = [f"{fleet}, {context}" for fleet in FLEETS for context in CONTEXTS]
    table = tables.bare_table("model", *heads, texts=("model",))
    for model in MODELS:
        taken = [seconds(model, fleet, context) for fleet in FLEETS for context in CONTEXTS]
        table.add_row(model, *(f"{seconds:.1f} s" for seconds in taken))
    tables.show(table, tables.console())


if __name__ == "__main__":
    main()
