"""Bugs that other projects had, planted in small models: each is found, and named by its kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ringray
from ringray.verification.probes import PROBES, Evidence, run_probes
from ringray.verification.verdict import MISTAKES
from ringray.verification.world import World
from tests.support import planted
from tests.support.planted import BUGS
from tests.support.verification import verified

TARGET = Path(planted.__file__)
# A bug of each probe meets all probes; the others run as far as the one that finds them.
WHOLE = {bug.probe: name for name, bug in reversed(BUGS.items())}.values()


class Planted(World):
    """Processes that are kept from one bug to the next."""

    place: Path
    feature = ""

    def plant(self, bug: str) -> Evidence:
        """Builds the model with a bug, on all ranks."""
        self.place.write_text(bug)
        feature = BUGS[bug].feature if bug in BUGS else bug
        # What one process computes has no bug in it.
        same = feature == self.feature
        self._cache = {key: x for key, x in self._cache.items() if same and key[0] == "alone"}
        if not same:
            self.feature = feature
            self.ask("build", alone=True)
        self.ask("build")
        return Evidence(self)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("planted") / "bug"
        place.write_text("")
        patch.setenv(planted.VARIABLE, str(place))
        with Planted(str(TARGET), None, ranks=2, device="cpu", limit=600) as processes:
            processes.place = place
            yield processes


def test_the_page_has_the_tables_of_mistakes_and_of_bugs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    assert planted.mistakes() in page
    assert planted.table() in page


# Those of a feature stand together, so that one process builds its model once.
@pytest.mark.parametrize("bug", sorted(BUGS, key=lambda x: BUGS[x].feature))
def test_each_bug_is_found_and_named(world: Planted, bug: str) -> None:
    evidence, want = world.plant(bug), BUGS[bug]
    names = list(PROBES)
    names = names if bug in WHOLE else names[: names.index(want.probe) + 1]
    probes = dict(run_probes(evidence, names))
    first = evidence.findings[0]
    assert (first.probe, first.mistake) == (want.probe, want.mistake), first
    assert (first.rank, first.layer, first.token) == (want.rank, want.layer, want.token), first
    assert MISTAKES[want.mistake].meaning in first.sentence
    # One mistake is told once; what follows from it claims no other kind.
    assert {x.mistake for x in evidence.findings[1:]} <= {"follows"}
    assert probes[want.probe] == "wrong"


@pytest.mark.parametrize("feature", ["", "ahead", "router"])
def test_the_model_without_a_bug_is_right(world: Planted, feature: str) -> None:
    evidence = world.plant(feature)
    probes = dict(run_probes(evidence, list(PROBES)))
    assert not evidence.findings
    without = {"positions", "router"} - ({"router"} if feature == "router" else set())
    assert {name for name, x in probes.items() if x != "right"} == without


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(planted.VARIABLE, raising=False)


@pytest.mark.usefixtures("alone")
def test_verify_tells_the_kind_and_the_place() -> None:
    verdict = verified(f"{TARGET}:build_leak", probes=("documents", "causality"))
    assert (verdict.right, verdict.exit_code) == (False, 1)
    mistakes = [x.mistake for x in verdict.findings]
    assert mistakes[0] == "documents"
    assert set(mistakes[1:]) == {"follows"}
    assert "rank 0, layer layers.0.attention.out, token 7" in str(verdict)


@pytest.mark.usefixtures("alone")
def test_verify_finds_nothing_on_three_ranks() -> None:
    probes = "logits", "documents", "loss", "gradients", "padding"
    verdict = ringray.verify(f"{TARGET}:build_right", ranks=3, probes=probes, limit=600)
    assert verdict.right, verdict
