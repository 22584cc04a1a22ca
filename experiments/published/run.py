"""Context parallelism that others have measured: published figures beside predicted ones.

    python experiments/published/run.py [FILE.yaml ...]

A file holds the tables of one source, and under ``implementation`` how its system computes a step,
counted in its code (``theirs``). Rows under ``reference``, such as one device alone, set the rate
of attention: the hardware's curves are scaled until these rows are exact, forward first; where a
row has ``own_mask``, only those of its mask. The other rows are predicted with that rate. ``why``:
what explains rivals in another order.

The null model beside it knows no hardware: each device computes at the rate of the last reference,
messages cost nothing, and a ring takes as long as its busiest rank.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import theirs
import yaml

from ringray.lab.predict import hardware
from ringray.lab.predict.hardware import Curve, Direction, Hardware

HERE = Path(__file__).parent
SOURCES = ("magi-attention", "ring-flash-attention", "usp")  # files of tables
TIE = 0.03  # rivals whose figures differ by less have no order


class Row(NamedTuple):
    """One published figure, its prediction and the null model's, in the unit of its source."""

    ranks: int
    partition: str
    transport: str
    published: float
    predicted: float
    null: float

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

    def null(self) -> Table:
        """Returns the table as the null model predicts it."""
        return self._replace(rows=tuple(row._replace(predicted=row.null) for row in self.rows))

    def rivals(self) -> Iterator[tuple[Row, Row]]:
        """Yields the pairs of as many ranks whose published figures differ, the better first."""
        for pair in itertools.combinations(self.rows, 2):
            worse, better = sorted(pair, key=lambda row: row.published)
            if worse.ranks == better.ranks and math.log(better.published / worse.published) > TIE:
                yield better, worse

    def gains(self) -> list[float]:
        """Returns by how much the better of each pair is predicted to be better, as a logarithm."""
        return [math.log(one.predicted / other.predicted) for one, other in self.rivals()]

    def gaps(self) -> list[tuple[float, float]]:
        """Returns by how much pairs of as many ranks differ, predicted and published, as
        logarithms."""
        pairs = itertools.combinations(self.rows, 2)
        return [
            (math.log(one.predicted / other.predicted), math.log(one.published / other.published))
            for one, other in pairs
            if one.ranks == other.ranks
        ]

    def disordered(self, tie: float = TIE) -> bool:
        """Tells whether a pair is predicted the other way round, and by more than ``tie``."""
        return any(-gain > tie for gain in self.gains())


def tables(path: Path) -> list[Table]:
    """Returns the tables of a file, predicted."""
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [_table(table, read["problem"], read["unit"]) for table in read["tables"]]


def _table(table: Mapping[str, Any], shared: Mapping[str, Any], unit: str) -> Table:
    problem = {**shared, **table["problem"]}
    device = hardware.table()[table["device"]]
    if "kernel" in problem:  # curves of the device on which this kernel was measured
        kin = hardware.table()[problem.pop("kernel")]
        device = device.model_copy(update={"attention": kin.attention, "tables": kin.tables})
    if "attention" in table:
        curves = tuple(Curve(**one) for one in table["attention"])
        device = device.model_copy(update={"attention": curves, "tables": None})
    for row in table["reference"]:
        device = _calibrated(device, problem | row, unit)
    rows = []
    for fields in (problem | row for row in table["rows"]):
        null = _null(fields, problem | table["reference"][-1], device, unit)
        names = fields["partition"], fields["transport"]
        figures = fields["published"], _figure(fields, device, unit), null
        rows.append(Row(fields["ring_size"], *names, *figures))
    return Table(table["name"], unit, tuple(rows), table.get("why", ""))


def _figure(fields: Mapping[str, Any], device: Hardware, unit: str) -> float:
    """Returns the figure of a row in ``unit``."""
    seconds, flops = _cost(fields, device)
    return 1 / seconds if unit == "iterations/s" else flops / seconds / 1e12


def _null(
    fields: Mapping[str, Any], reference: Mapping[str, Any], device: Hardware, unit: str
) -> float:
    """Returns the null model's figure of a row in ``unit``."""
    slower = 1.0
    if fields["causal"] and fields["partition"] == "contiguous":
        # Of M blocks the last one sees 2M - 1 halves of a block and the mean one M.
        blocks = fields["ring_size"] // int(fields["transport"].partition(":")[2] or 1)
        slower = (2 * blocks - 1) / blocks
    if unit == "iterations/s":
        slower *= _cost(fields, device)[1] / _cost(reference, device)[1]
    return float(reference["published"] / slower)


def _cost(fields: Mapping[str, Any], device: Hardware) -> tuple[float, float]:
    """Returns seconds and the FLOPs of a rank."""
    how, direction = theirs.Implementation.read(fields["implementation"]), fields["direction"]
    both: tuple[Direction, ...] = ("forward", "backward")
    ways = both if direction == "forward+backward" else (direction,)
    pairs = fields["batch"] * fields["seq_len"] ** 2 / (1 + fields["causal"])
    of_pair = fields["heads"] * fields["head_dim"] * sum(theirs.PAIR_FLOPS[way] for way in ways)
    seconds = sum(theirs.seconds(fields, way, device, how) for way in ways)
    return seconds, of_pair * pairs / fields["ring_size"]


def _calibrated(device: Hardware, fields: Mapping[str, Any], unit: str) -> Hardware:
    """Returns ``device`` with the curves of the row's last pass scaled so that it is exact, those
    of its mask alone where it says so."""
    direction: Direction = "forward" if fields["direction"] == "forward" else "backward"
    mask = fields["causal"] if fields.get("own_mask") else None
    low, high = 1 / 64, 64.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        scaled = _scaled(device, direction, mask, middle)
        slow = _figure(fields, scaled, unit) < fields["published"]
        low, high = (middle, high) if slow else (low, middle)
    return _scaled(device, direction, mask, high)


def _scaled(device: Hardware, direction: Direction, causal: bool | None, factor: float) -> Hardware:
    curves = []
    for one in device.attention:
        by = factor if one.direction == direction and causal in (None, one.causal) else 1.0
        rates = {rows: rate * by for rows, rate in one.rates.items()}
        curves.append(one.model_copy(update={"rates": rates}))
    return device.model_copy(update={"attention": tuple(curves)})


class Errors(NamedTuple):
    """How far predictions are from what is published."""

    median: float
    ninth: float  # of ten
    fast: float  # share that is predicted too fast

    def __str__(self) -> str:
        return (
            f"median error {self.median:.1%}, 90% below {self.ninth:.1%}, {self.fast:.0%} too fast"
        )


def errors(ratios: Sequence[float]) -> Errors:
    """Returns the errors of predicted over published rates."""
    far = sorted(abs(ratio - 1) for ratio in ratios)
    fast = sum(ratio > 1 for ratio in ratios) / len(ratios)
    return Errors(statistics.median(far), far[int(0.9 * len(far))], fast)


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows as they are summed up: all, and those whose error tells something."""
    rings = [row for row in rows if row.transport == "ring"]
    return {
        "rows": list(rows),
        "rings": rings,
        "even rings": [row for row in rings if row.partition != "contiguous"],
        "others": [row for row in rows if row.transport != "ring"],
    }


def summary(found: Sequence[Table]) -> list[str]:
    """Returns how far predictions and the null model are from all tables, in lines."""
    alone = [table.null() for table in found]
    lines = []
    for name in groups([]):
        for who, tables_of in (("predicted", found), ("null model", alone)):
            some = groups([row for table in tables_of for row in table.rows])[name]
            far = errors([row.ratio for row in some])
            lines.append(
                f"{len(some):3} {name:10}  {who:10}  median error {far.median:.1%}, "
                f"90% below {far.ninth:.1%}, {far.fast:.0%} too fast"
            )
    for who, tables_of in (("predicted", found), ("null model", alone)):
        apart = [gain for table in tables_of for gain in table.gains()]
        right, wrong = (sum(sign * gain > TIE for gain in apart) for sign in (1, -1))
        lines.append(
            f"{len(apart)} pairs of rivals, {who}: {right} in order, {wrong} reversed, "
            f"{len(apart) - right - wrong} as equal"
        )
    gaps = [gap for table in found for gap in table.gaps()]
    for which, pairs in (
        ("at most", [gap for gap in gaps if abs(gap[0]) <= TIE]),
        ("more than", [gap for gap in gaps if abs(gap[0]) > TIE]),
    ):
        right = sum(predicted * published > 0 for predicted, published in pairs)
        lines.append(
            f"{len(pairs)} pairs predicted to differ by {which} {TIE:.0%}: {right} in order"
        )
    right = sum(not table.disordered() for table in found)
    clear = sum(not table.disordered(0.0) for table in found)
    lines.append(f"order right in {right} of {len(found)} tables ({clear} without ties)")
    return lines


def main(paths: Sequence[str]) -> None:
    """Prints all tables of the files, by default of all beside this one."""
    found = [
        table
        for path in [Path(one) for one in paths] or [HERE / f"{name}.yaml" for name in SOURCES]
        for table in tables(path)
    ]
    for table in found:
        print(f"\n{table.name}, {table.unit}\n{'':32} published  predicted  ratio  null model")
        for row in table.rows:
            point = f"{row.ranks:4}  {row.partition}, {row.transport}"
            figures = f"{row.published:9.6g}  {row.predicted:9.4g} {row.ratio:6.2f}"
            print(f"{point:32} {figures} {row.null / row.published:11.2f}")
        ties = sum(0 < -gain <= TIE for gain in table.gains())
        order = f"reversed: {table.why}" if table.disordered() else "right"
        print(f"order {order}{f' ({ties} pairs predicted within {TIE:.0%})' if ties else ''}")
    print()
    for line in summary(found):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
