"""Things that the probes of one verification share: the processes, the sizes, the batches and the
findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ringray.verification import batches
from ringray.verification.batches import BatchSizes
from ringray.verification.compare import BatchComparison
from ringray.verification.observation import COLUMNS
from ringray.verification.verdict import MISTAKES, Finding
from ringray.verification.world import FailedRank, Refused, World

# One mistake shows in many probes: what these find may be why the ones after them find something.
_CAUSES = "logits", "router", "loss", "gradients"


class Skip(Refused):
    """A probe has nothing to try; the reason."""


@dataclass
class Evidence:
    """The processes of a target, and what is wrong with it."""

    world: World
    findings: list[Finding] = field(default_factory=list)

    @cached_property
    def sizes(self) -> BatchSizes:
        """Returns the sizes of batches; sequences are the least multiple of what ranks can share
        that is long enough."""
        constants = self.world.facts["constants"]
        # Even for partitions that deal two blocks to each rank.
        unit = max(constants["UNIT"], 2) * self.world.ranks
        tokens = -(-constants["SEQ_LEN"] // unit) * unit
        vocabulary = min(self.world.facts["vocabulary"], COLUMNS)
        return BatchSizes(vocabulary, constants["BATCH"], tokens)

    @cached_property
    def plain(self) -> BatchComparison:
        """Returns the comparison of whole sequences."""
        return BatchComparison(self.world, batches.plain(self.sizes))

    @cached_property
    def packed(self) -> BatchComparison:
        """Returns the comparison of packed documents: in one row, unless ranks get whole rows."""
        rows = 1 if self.plain.shared else self.sizes.rows
        return BatchComparison(self.world, batches.packed(self.sizes, rows))

    def cases(self, probe: str) -> Iterator[BatchComparison]:
        """Generates the comparison of whole sequences, and that of packed documents if there is
        one; the probe of documents says why there is none."""
        yield self.plain
        try:
            packed = self.packed
        except Refused:
            return
        except FailedRank as error:
            self.failed(probe, error)
            return
        yield packed

    def finding(
        self, probe: str, mistake: str, what: str, *, after: tuple[str, ...] = (), **facts: Any
    ) -> None:
        """Adds a finding whose sentence names the kind of mistake. That is ``follows`` if there is
        a finding of the probes ``after`` which it comes, or of those on which most others rest;
        dropout rests on none."""
        before = () if probe == "dropout" else _CAUSES + after
        causes = [x.probe for x in self.findings if x.probe in before]
        mistake = "follows" if causes else mistake
        sentence = ": ".join([f"{what}; {MISTAKES[mistake].meaning}", *causes[:1]])
        self.findings.append(Finding(probe, mistake, sentence, **facts))

    def failed(self, probe: str, error: FailedRank) -> None:
        """Adds the finding of ranks that fail where others do not: in a training those would wait
        for ever. Where several probes use a batch, the first one tells it."""
        sentence = f"{error.what}; {MISTAKES[error.mistake].meaning}"
        if sentence not in [finding.sentence for finding in self.findings]:
            rank = error.rank if error.rank >= 0 else None
            self.findings.append(
                Finding(probe, error.mistake, sentence, rank, details=error.details)
            )
