"""Context parallelism that others have measured: published figures beside predicted ones.

    python experiments/published/run.py [FILE.yaml ...]

A file holds the tables of one source. Rows under ``reference``, such as one device alone, set the
rate of attention: the hardware's curves are scaled until these rows are exact, forward first. The
other rows are predicted with that rate. ``why``: what explains rivals in another order.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ringray.lab.predict import cost_model, hardware
from ringray.lab.predict.hardware import Curve, Direction, Fleet, Hardware
from ringray.lab.trial.config import TrialConfig

HERE = Path(__file__).parent
TIE = 0.03  # rivals whose figures differ by less have no order

_TRIAL: dict[str, Any] = {
    "threads": 1, "window": None, "documents": None, "backward": "auto", "backend": "auto",
    "blocks": None, "partition": "contiguous", "transport": "ring", "device": "cuda",
    "placement": "spread", "warmup": 1, "repeats": 1, "seed": 0, "baseline": None,
    "baseline_threads": None, "replica": 0,
}  # fmt: skip


class Row(NamedTuple):
    """One published figure and its prediction, in the unit of its source."""

    ranks: int
    strategy: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Returns predicted over published."""
        return self.predicted / self.published


class Table(NamedTuple):
    """Rows; those of as many ranks are rivals. ``why``: the reason for a reversed order, or ""."""

    name: str
    unit: str
    rows: tuple[Row, ...]
    why: str

    def disordered(self, tie: float = TIE) -> list[tuple[Row, Row]]:
        """Returns the rivals whose published order is predicted the other way round, and by more
        than ``tie``."""
        return [
            (a, b)
            for a, b in itertools.combinations(self.rows, 2)
            if a.ranks == b.ranks
            and abs(math.log(a.published / b.published)) > TIE
            and math.log(a.predicted / b.predicted) * math.copysign(1, b.published - a.published)
            > tie
        ]


def tables(path: Path) -> list[Table]:
    """Returns the tables of a file, predicted."""
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [_table(table, read["problem"], read["unit"]) for table in read["tables"]]


def _table(table: Mapping[str, Any], shared: Mapping[str, Any], unit: str) -> Table:
    problem = {**shared, **table["problem"]}
    device = hardware.table()[table["device"]]
    if "attention" in table:
        curves = tuple(Curve(**one) for one in table["attention"])
        device = device.model_copy(update={"attention": curves})
    for row in table["reference"]:
        device = _calibrated(device, problem | row, unit)
    rows = []
    for fields in (problem | row for row in table["rows"]):
        strategy = f"{fields['partition']}, {fields['transport']}"
        predicted = _figure(fields, device, unit)
        rows.append(Row(fields["ring_size"], strategy, fields["published"], predicted))
    return Table(table["name"], unit, tuple(rows), table.get("why", ""))


def _figure(fields: Mapping[str, Any], device: Hardware, unit: str) -> float:
    """Returns the figure of a row in ``unit``; backward alone is both passes without forward."""
    ranks, direction = fields["ring_size"], fields["direction"]
    nodes = -(-ranks // device.ranks_per_node)
    fleet = Fleet("published", device, nodes, -(-ranks // nodes))
    trial = {name: value for name, value in fields.items() if name != "published"}
    passes = ("forward+backward", "forward") if direction == "backward" else (direction,)
    costs = [
        cost_model.predict(TrialConfig(**_TRIAL | trial | {"direction": one}), fleet)
        for one in passes
    ]
    seconds = (costs[0].time_ms - sum(one.time_ms for one in costs[1:])) / 1e3
    flops = costs[0].flops - sum(one.flops for one in costs[1:])
    return 1 / seconds if unit == "iterations/s" else flops / seconds / ranks / 1e12


def _calibrated(device: Hardware, fields: Mapping[str, Any], unit: str) -> Hardware:
    """Returns ``device`` with the curves of the row's last pass scaled so that it is exact."""
    direction: Direction = "forward" if fields["direction"] == "forward" else "backward"
    low, high = 1 / 64, 64.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        slow = _figure(fields, _scaled(device, direction, middle), unit) < fields["published"]
        low, high = (middle, high) if slow else (low, middle)
    return _scaled(device, direction, high)


def _scaled(device: Hardware, direction: Direction, factor: float) -> Hardware:
    curves = []
    for one in device.attention:
        by = factor if one.direction == direction else 1.0
        rates = {rows: rate * by for rows, rate in one.rates.items()}
        curves.append(one.model_copy(update={"rates": rates}))
    return device.model_copy(update={"attention": tuple(curves)})


def main(paths: Sequence[str]) -> None:
    """Prints all tables of the files, by default of all beside this one."""
    found = [
        table
        for path in [Path(one) for one in paths] or sorted(HERE.glob("*.yaml"))
        for table in tables(path)
    ]
    for table in found:
        print(f"\n{table.name}, {table.unit}\n{'':32} published  predicted  ratio")
        for row in table.rows:
            point = f"{row.ranks:4}  {row.strategy}"
            print(f"{point:32} {row.published:9.6g}  {row.predicted:9.4g} {row.ratio:6.2f}")
        ties = len(table.disordered(0.0)) - len(table.disordered())
        order = f"reversed: {table.why}" if table.disordered() else "right"
        print(f"order {order}{f' ({ties} pairs predicted within {TIE:.0%})' if ties else ''}")
    errors = sorted(abs(row.ratio - 1) for table in found for row in table.rows)
    right = sum(not table.disordered() for table in found)
    print(
        f"\n{len(errors)} rows: median error {statistics.median(errors):.1%}, "
        f"90% below {errors[int(0.9 * len(errors))]:.1%}; order right in {right} of {len(found)} "
        f"tables ({sum(not table.disordered(0.0) for table in found)} without ties)"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
