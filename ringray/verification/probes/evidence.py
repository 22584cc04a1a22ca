"""What the probes of one verification share: the processes, the sizes and the batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ringray.verification import batches
from ringray.verification.batches import Sizes
from ringray.verification.compare import Comparison
from ringray.verification.mistakes import MISTAKES
from ringray.verification.process import Array
from ringray.verification.verdict import Finding
from ringray.verification.world import World


class Skip(Exception):
    """A probe has nothing to try; the reason."""


@dataclass
class Evidence:
    """The processes of a target, and what they have computed."""

    world: World
    cases: dict[str, Comparison] = field(default_factory=dict)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Returns the constants of the target."""
        constants: dict[str, Any] = self.world.facts["constants"]
        return constants

    @cached_property
    def sizes(self) -> Sizes:
        """Returns the sizes of batches."""
        constants = self.constants
        unit = constants["UNIT"] * self.world.ranks
        # Even for partitions that deal two blocks to each rank.
        unit = unit if constants["UNIT"] > 1 else 2 * unit
        vocabulary = self.world.facts["vocabulary"]
        return Sizes(vocabulary, constants["BATCH"], unit, constants["SEQ_LEN"])

    def case(self, name: str, make: Callable[[Sizes], dict[str, Array]]) -> Comparison:
        """Returns the comparison of a batch of ``batches``, made once."""
        if name not in self.cases:
            self.cases[name] = Comparison(self.world, make(self.sizes))
        return self.cases[name]

    @property
    def plain(self) -> Comparison:
        """Returns the comparison of whole sequences."""
        return self.case("plain", batches.plain)

    @property
    def packed(self) -> Comparison:
        """Returns the comparison of packed documents."""
        return self.case("packed", batches.packed)

    def finding(self, probe: str, mistake: str, what: str, **facts: Any) -> Finding:
        """Returns a finding whose sentence names the kind of mistake."""
        sentence = f"{what}; {MISTAKES[mistake]}" if mistake in MISTAKES else what
        return Finding(probe, mistake, sentence, **facts)
