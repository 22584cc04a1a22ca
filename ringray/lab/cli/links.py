"""``doctor --cluster``: measures the links between the nodes of a cluster, and prints them."""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median
from typing import TYPE_CHECKING

from ringray.base import units
from ringray.base.errors import UserError
from ringray.base.redaction import shown
from ringray.lab.cli.options import write
from ringray.lab.cluster.connect import connect, target
from ringray.lab.predict import calibration

if TYPE_CHECKING:
    from ringray.lab.predict.links import ClusterLinks

_MATRIX = 16  # nodes; of more only problems are printed


def links(arguments: argparse.Namespace) -> int:
    """Measures, keeps and prints the links; returns 1 if one could not be measured."""
    if target(arguments.address) == "local":
        raise UserError("--cluster: expected a running Ray beside it: --address HOST:PORT")
    with connect(arguments.address):
        from ringray.lab.ring import links as survey

        measured = survey.measure(
            lambda line: print(shown(f"links: {line}"), file=sys.stderr, flush=True)
        )
    place = calibration.write_links(measured)
    problems, outliers = list(measured.problems()), list(measured.outliers())
    if arguments.json is not None:
        record = {**measured.model_dump(mode="json"), "problems": problems, "outliers": outliers}
        write("--json", arguments.json, json.dumps(record, indent=1) + "\n")
    if arguments.json != "-":
        if len(measured.nodes) <= _MATRIX:
            _print(measured)
        for line in (*problems, *outliers):
            print(shown(line))
        print(
            "\n`ringray plan SPEC --on HARDWARE:NODESxRANKS` predicts with these links for such "
            f"nodes; kept in {place}"
        )
    return int(bool(problems))


def _print(cluster: ClusterLinks) -> None:
    """Prints a matrix of the nodes."""
    from ringray.lab.report import tables

    rates = [pair.bandwidth for pair in cluster.pairs if pair.error is None] or [0.0]
    unit, scale = ("GB/s", 1e9) if median(rates) >= 1e9 else ("MB/s", 1e6)
    texts = {pair.nodes: units.digits(pair.bandwidth / scale) for pair in cluster.pairs}
    texts |= {pair.nodes[::-1]: units.digits(pair.latency * 1e3) for pair in cluster.pairs}
    for pair in cluster.pairs:
        if pair.error is not None:
            texts[pair.nodes] = texts[pair.nodes[::-1]] = "none"
    everyone = range(len(cluster.nodes))
    heads = "", "node", *(str(node + 1) for node in everyone)
    table = tables.bare_table(*heads, texts=("node",))
    for row in everyone:
        cells = (texts.get((row, column), units.ABSENT) for column in everyone)
        table.add_row(str(row + 1), cluster.nodes[row].name, *cells)
    console = tables.console()
    console.print(f"{unit} each way above the diagonal, latency in ms below it\n")
    tables.show(table, console)
    console.print()
