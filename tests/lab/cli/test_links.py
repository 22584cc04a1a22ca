"""``ringray doctor --cluster``: what it prints, and what it refuses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from ringray.lab import cli
from ringray.lab.cli import links
from ringray.lab.ring import links as survey
from tests.lab.predict.test_links import cluster

if TYPE_CHECKING:
    from pathlib import Path

    from ringray.lab.predict.links import ClusterLinks

AT = ("--address", "10.0.0.2:6379")


@pytest.fixture(autouse=True)
def empty(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the cluster one that has such links."""

    def find(found: ClusterLinks) -> None:
        monkeypatch.setattr(links, "connect", lambda address: nullcontext())
        monkeypatch.setattr(survey, "measure", lambda say: found)

    return find


def test_the_matrix_has_bandwidth_above_and_latency_below(
    finds: Any, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(cluster(3, {(0, 1): {"bandwidth": 95e6}, (1, 2): {"latency": 2e-4}}))
    assert cli.main(["doctor", "--cluster", *AT]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "10.0.0.2", "–", "0.0950", "1.20"] in rows
    assert ["2", "10.0.0.3", "0.100", "–", "1.20"] in rows
    assert ["3", "10.0.0.4", "0.100", "0.200", "–"] in rows
    assert out.startswith("GB/s each way above the diagonal, latency in ms below it\n")
    assert "10.0.0.2 ↔ 10.0.0.3: 95.0 MB/s, the median is 1.20 GB/s" in out
    (kept,) = (home / "hardware").iterdir()
    assert f"kept in {kept}" in out
    finds(cluster(3, {(0, 1): {"error": "no messages pass: timed out"}}))
    assert cli.main(["doctor", "--cluster", *AT]) == 1
    assert "10.0.0.2 ↔ 10.0.0.3: no messages pass: timed out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--cluster"], "--cluster: expected a running Ray beside it: --address HOST:PORT"),
        (["--cluster", "--address", "local"], "--cluster: expected a running Ray"),
        (["--cluster", "--address", "127.0.0.1:1"], "no Ray answers at 127.0.0.1:1"),
        (["--json", "x"], "--json: got 'x', expected beside --cluster only"),
    ],
)
def test_what_cannot_be_is_refused(
    given: list[str], says: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *given]) == 2
    assert says in capsys.readouterr().err
    assert not (home / "hardware").exists()
