"""Calibrations: where they are kept, for which machine and versions they hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ringray.base import provenance
from ringray.base.errors import UserError
from ringray.lab.plan import plan
from ringray.lab.predict import calibration
from ringray.lab.predict.hardware import table
from ringray.lab.specs import model as spec

if TYPE_CHECKING:
    from pathlib import Path

SPEC = "version: 1\nname: x\nkind: latency\nring: {size: 8, device: cpu}\nproblem: {seq_len: 4k}\n"


@pytest.fixture
def fields(home: Path) -> dict[str, Any]:
    """An entry of an own kind, and an empty home."""
    found = table()["cpu"].model_dump(mode="json", exclude_none=True)
    return found | {"cores": 2, "op": 1.0, "measured": "2026-01-01T00:00:00+00:00"}


def test_an_entry_is_read_as_it_was_written(fields: dict[str, Any], home: Path) -> None:
    place = calibration.write(fields, "cpu")
    found, where = calibration.find("cpu")
    assert found is not None
    assert (found.op, found.cores, where) == (1.0, 2, str(place))
    assert found.versions["torch"] == provenance.versions()["torch"]
    assert place.parent == home / "hardware"
    assert place.stat().st_mode & 0o077 == 0
    assert calibration.find("cuda")[0] is None


def test_plans_for_this_machine_take_it(fields: dict[str, Any]) -> None:
    calibration.write(fields, "cpu")
    on = calibration.fleet("local")
    assert on.ranks >= 8, "ranks that share cores are as many as one likes"
    for built in (plan.build(spec.parse(SPEC)), plan.build(spec.parse(SPEC), on)):
        (trial,) = built.runnable
        assert trial.predicted is not None
        assert trial.predicted.time_ms > 1000, "the op alone takes a second"


@pytest.mark.parametrize("changed", ["torch", "kernels", "cpu"])
def test_one_of_another_version_is_not_used(
    fields: dict[str, Any], changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration.write(fields, "cpu")
    now = calibration.versions("cpu") | {changed: "new"}
    monkeypatch.setattr(calibration, "versions", lambda device: now)
    before = table()["cpu"].op
    assert plan.local_fleet("cpu").hardware.op == before
    with pytest.raises(UserError, match=rf"{changed} .*, now new; run `ringray calibrate` again"):
        calibration.fleet("local:4")


def test_a_damaged_file_is_named(fields: dict[str, Any]) -> None:
    place = calibration.write(fields, "cpu")
    place.write_text(json.dumps({"local": {"title": 1}}))
    with pytest.raises(UserError, match=f"{place.name}: local.title: got 1"):
        calibration.find("cpu")
