"""Packs tables of measured times into the small files that predictions read.

    python experiments/measured/pack.py FOLDER

reads ``attention_causal.csv``, ``attention_full.csv``, ``attention_mla.csv``, ``products.csv`` and
``collectives.csv`` and writes a file for each system into ``ringray/lab/predict/measured``. The
tables are facts that github.com/ai-dynamo/aiconfigurator (Apache-2.0, commit 095f58a) publishes
with the software that measured them: 16-bit rows, batch 1, the newest version of each framework,
the fastest kernel of vLLM, TensorRT-LLM and SGLang for each row. A line has the times of a curve
and, in letters, the source of each.
"""

from __future__ import annotations

import csv
import statistics
import string
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ringray.lab.predict import measured

MLA = 192, 128  # head dims of Q and K, and of V
LETTERS = string.ascii_letters
HEADER = """\
# Measured times on {system}, ms: facts of github.com/ai-dynamo/aiconfigurator (Apache-2.0,
# commit 095f58a), packed by experiments/measured/pack.py. "source": letter, software. "at": the
# rows, m or elements of a kind. Then curves: head dim, window, heads, K/V heads (product: n, k;
# collectives: GPUs) | times | the source of each.
"""

# Columns of each table that tell its curves apart, the column along a curve, and that of sources.
TABLES = {
    "attention_causal": (("head_dim", "window", "heads", "kv_heads"), "rows", "kernel"),
    "attention_full": (("head_dim", "window", "heads", "kv_heads"), "rows", "kernel"),
    "attention_mla": (("heads",), "rows", "kernel"),
    "products": (("n", "k"), "m", "kernel"),
    "collectives": (("gpus",), "elements", "nccl"),
}


class Time(NamedTuple):
    """One measured time. ``curve``: numbers that tell it apart; ``at``: its place on the curve."""

    system: str
    kind: str
    curve: tuple[int, ...]
    at: int
    ms: float
    source: str


def read(folder: Path) -> Iterator[Time]:
    """Yields the times of all tables that are there."""
    for table, (curve, at, source) in TABLES.items():
        path = folder / f"{table}.csv"
        if not path.exists():
            continue
        usual = {"products": "product"}.get(table, table.removeprefix("attention_"))
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                kind = row.get("operation", usual)
                numbers = tuple(int(row[name]) for name in curve)
                if kind == "mla":  # as other attention; of the head dim of Q and K
                    numbers = (MLA[0], 0, *numbers, *numbers)
                yield Time(
                    row["system"], kind, numbers, int(row[at]), float(row["ms"]), row[source]
                )


def packed(times: Iterable[Time]) -> dict[str, str]:
    """Returns the text of each system's file; of times that were measured again the median."""
    systems: dict[str, dict[str, dict[tuple[int, ...], dict[int, list[Time]]]]] = {}
    for time in times:
        curves = systems.setdefault(time.system, {}).setdefault(time.kind, {})
        curves.setdefault(time.curve, {}).setdefault(time.at, []).append(time)
    return {system: _text(system, kinds) for system, kinds in sorted(systems.items())}


def _text(
    system: str, kinds: Mapping[str, Mapping[tuple[int, ...], Mapping[int, list[Time]]]]
) -> str:
    every = (one for curves in kinds.values() for at in curves.values() for one in at.values())
    sources = sorted({time.source for times in every for time in times})
    letter = dict(zip(sources, LETTERS, strict=False))
    lines = [f"source {letter[source]} {source}" for source in sources]
    for kind, curves in sorted(kinds.items()):
        places = sorted({place for curve in curves.values() for place in curve})
        lines.append(f"at {kind} {' '.join(map(str, places))}")
        for numbers, curve in sorted(curves.items()):
            if sorted(curve) != places:
                raise SystemExit(f"{system}: {kind} {numbers} has other columns than the rest")
            ms = [statistics.median(time.ms for time in curve[place]) for place in places]
            origins = "".join(letter[curve[place][0].source] for place in places)
            figures = " ".join(f"{one:.4g}" for one in ms)
            lines.append(f"{kind} {' '.join(map(str, numbers))} | {figures} | {origins}")
    return HEADER.format(system=system) + "\n".join(lines) + "\n"


def main(folder: str) -> None:
    """Writes the files of all systems."""
    for system, text in packed(read(Path(folder))).items():
        (measured.FOLDER / f"{system}.curves").write_text(text, encoding="utf-8")
        print(f"{system}: {len(text):,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
