"""The table of hardware: complete entries with figures that devices can have."""

import itertools
import re
from pathlib import Path

import pytest

from ringray.base.errors import UserError
from ringray.lab.predict import hardware

DEVICES = ("a100", "h100", "h800", "h200", "b200", "mi300x", "l40s", "tpu-v3", "tpu-v4", "tpu-v5e")


@pytest.mark.parametrize("name", DEVICES)
def test_an_entry_is_complete_and_of_a_device(name: str) -> None:
    entry = hardware.table()[name]
    assert {"bfloat16", "float32"} <= set(entry.peak)
    measured = {(one.direction, one.causal) for one in entry.attention if one.head_dim == 128}
    assert measured == {(way, c) for way in ("forward", "backward") for c in (False, True)}
    assert entry.price is None  # it changes by the week
    assert any("data sheet" in one or "docs" in one or "chip" in one for one in entry.sources)
    assert not re.search(r"pypi|conda|npmjs", " ".join(entry.sources))

    assert 1e14 <= entry.peak["bfloat16"] <= 3e15  # dense
    assert entry.peak["float32"] < entry.peak["bfloat16"]
    assert 10e9 <= entry.memory <= 300e9
    assert 5e11 <= entry.memory_bandwidth <= 1e13
    assert 1e9 <= entry.outer.bandwidth < entry.inner.bandwidth * 1.1
    assert entry.inner.bandwidth < entry.memory_bandwidth
    assert 1e-7 <= entry.inner.latency < entry.outer.latency < 1e-3
    assert 0.4 <= entry.products < 0.95


@pytest.mark.parametrize("name", [*DEVICES, "cpu"])
def test_attention_is_slower_than_the_peak_and_faster_with_more_rows(name: str) -> None:
    entry = hardware.table()[name]
    for one in entry.attention:
        rates = [one.rates[rows] for rows in sorted(one.rates)]
        assert max(rates) < 0.85 * entry.peak[one.dtype], one
        assert all(late > 0.95 * early for early, late in itertools.pairwise(rates)), one


MINE = """mine:
  title: mine
  memory: 8.0e+10
  memory_bandwidth: 1.0e+12
  peak: {float32: 1.0e+14}
  ranks_per_node: 8
  inner:
    bandwidth: 1.0e+11
    latency: 1.0e-6
  outer: {bandwidth: 1.0e+10, latency: 1.0e-5}
  products: 0.7
  attention:
  - dtype: float32
    causal: false
    head_dim: 64
    direction: forward
    rates: {1024: 1.0e+13}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: mine", "titel: mine", "mine.titel: field: got 'titel', expected one of title,"),
        ("8.0e+10", "80 GB", "mine.memory: got '80 GB', expected a valid number"),
        ("peak: {float32: 1.0e+14}", "peak: {float23: 1.0e+14}", "did you mean 'float32'?"),
        ("{1024: 1.0e+13}", "{1024: 1.0e+30}", "far beyond the peak; both are FLOP/s"),
    ],
)
def test_a_wrong_file_is_told_by_its_field(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    assert hardware.read_entries(path)["mine"].ranks_per_node == 8
    assert MINE.count(old) == 1
    path.write_text(MINE.replace(old, new))
    with pytest.raises(UserError) as caught:
        hardware.parse_fleet(f"{path}:2x4")
    lines = [line for line in str(caught.value).splitlines() if line.startswith(f"{path}: ")]
    assert any(message in line for line in lines), str(caught.value)
