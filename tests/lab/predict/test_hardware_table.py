"""The table of hardware: complete entries with figures that devices can have."""

import itertools
import re

import pytest

from ringray.lab.predict import hardware

DEVICES = ("a100", "h100", "h800", "h200", "b200", "mi300x", "l40s", "tpu-v3", "tpu-v4", "tpu-v5e")


@pytest.mark.parametrize("name", DEVICES)
def test_an_entry_is_complete(name: str) -> None:
    entry = hardware.table()[name]
    assert entry.memory is not None
    assert {"bfloat16", "float32"} <= set(entry.peak)
    measured = {(one.direction, one.causal) for one in entry.attention if one.head_dim == 128}
    assert measured == {(way, c) for way in ("forward", "backward") for c in (False, True)}
    assert entry.price is None  # it changes by the week
    assert any("data sheet" in one or "docs" in one or "chip" in one for one in entry.sources)
    assert not re.search(r"pypi|conda|npmjs", " ".join(entry.sources))


@pytest.mark.parametrize("name", DEVICES)
def test_its_figures_are_those_of_a_device(name: str) -> None:
    entry = hardware.table()[name]
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


@pytest.mark.parametrize("name", DEVICES)
def test_a_triangle_and_a_backward_pass_are_no_faster_per_flop(name: str) -> None:
    curves = {(c.head_dim, c.direction, c.causal): c for c in hardware.table()[name].attention}
    for (dim, way, causal), one in curves.items():
        whole = curves.get((dim, way, False))
        forward = curves.get((dim, "forward", causal))
        for rows in one.rates:
            if whole and rows in whole.rates:
                assert one.rates[rows] <= whole.rates[rows]
            if forward and rows in forward.rates:
                assert one.rates[rows] <= 1.01 * forward.rates[rows]


def test_a_link_counts_one_way() -> None:
    """Data sheets of NVLink print both ways together."""
    one_way = {"a100": 300e9, "h100": 450e9, "h800": 200e9, "h200": 450e9, "b200": 900e9}
    for name, nominal in one_way.items():
        assert 0.7 * nominal <= hardware.table()[name].inner.bandwidth <= nominal
