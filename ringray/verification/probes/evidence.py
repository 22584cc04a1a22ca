"""What the probes of one verification share: the processes, the sizes, the batches and the
findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ringray.verification import batches
from ringray.verification.batches import BatchSizes
from ringray.verification.compare import Compared
from ringray.verification.mistakes import MISTAKES
from ringray.verification.observation import COLUMNS, Array
from ringray.verification.verdict import Finding
from ringray.verification.world import FailedRank, World

# One mistake shows in many probes: what these find may be why the ones after them find something.
_CAUSES = "logits", "router", "loss", "gradients"


class Skip(Exception):
    """A probe has nothing to try; the reason."""


@dataclass
class Evidence:
    """The processes of a target, what they have computed, and what is wrong with it."""

    world: World
    cases: dict[str, Compared] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Returns the constants of the target."""
        constants: dict[str, Any] = self.world.facts["constants"]
        return constants

    @cached_property
    def sizes(self) -> BatchSizes:
        """Returns the sizes of batches."""
        constants = self.constants
        unit = constants["UNIT"] * self.world.ranks
        # Even for partitions that deal two blocks to each rank.
        unit = unit if constants["UNIT"] > 1 else 2 * unit
        vocabulary = min(self.world.facts["vocabulary"], COLUMNS)
        return BatchSizes(vocabulary, constants["BATCH"], unit, constants["SEQ_LEN"])

    def case(self, name: str, make: Callable[[BatchSizes], dict[str, Array]]) -> Compared:
        """Returns the comparison of a batch of ``batches``, made once."""
        if name not in self.cases:
            self.cases[name] = Compared(self.world, make(self.sizes))
        return self.cases[name]

    @property
    def plain(self) -> Compared:
        """Returns the comparison of whole sequences."""
        return self.case("plain", batches.plain)

    @property
    def packed(self) -> Compared:
        """Returns the comparison of packed documents."""
        return self.case("packed", batches.packed)

    def finding(
        self,
        probe: str,
        mistake: str,
        what: str,
        *,
        after: tuple[str, ...] | None = (),
        **facts: Any,
    ) -> Finding:
        """Returns a finding whose sentence names the kind of mistake; none but ``follows`` if a
        probe of ``after``, or one on whose results most others rest, has a finding; None: it rests
        on nothing."""
        before = () if after is None else _CAUSES + after
        causes = [x.probe for x in self.findings if x.probe in before]
        if causes:
            mistake, sentence = "follows", f"{what}; {MISTAKES['follows']} {causes[0]}"
        else:
            sentence = f"{what}; {MISTAKES[mistake]}"
        self.findings.append(Finding(probe, mistake, sentence, **facts))
        return self.findings[-1]

    def failed(self, probe: str, error: FailedRank) -> None:
        """Adds the finding of ranks that fail where others do not: in a training those would wait
        for ever. Where several probes use a batch, the first one tells it."""
        sentence = f"{error.what}; {MISTAKES[error.mistake]}"
        if sentence not in [finding.sentence for finding in self.findings]:
            rank = error.rank if error.rank >= 0 else None
            self.findings.append(
                Finding(probe, error.mistake, sentence, rank, details=error.details)
            )
