"""What a verification came to: findings, and what each probe says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        probe: that shows it.
        mistake: the kind of mistake that would look like this, a name of ``mistakes.MISTAKES``.
        sentence: what differs, in words, with the kind of mistake.
        rank, layer, token: where it begins; None where that has no meaning.
        error, allowed: relative, None where nothing was compared.
    """

    probe: str
    mistake: str
    sentence: str
    rank: int | None = None
    layer: str | None = None
    token: int | None = None
    error: float | None = None
    allowed: float | None = None


@dataclass
class Verdict:
    """The result of a verification.

    ``probes``: name -> ``right``, ``wrong``, or ``skipped: `` with the reason.
    """

    target: str
    adapter: str
    ranks: int
    probes: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Tells whether nothing was found."""
        return not self.findings

    @property
    def exit_code(self) -> int:
        """Returns that of the command: 0 right, 1 wrong."""
        return 0 if self.right else 1

    def as_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self) | {"right": self.right}

    def __str__(self) -> str:
        word = "right" if self.right else "WRONG"
        title = f"{self.target} on {self.ranks} ranks, by {self.adapter}"
        width = max(map(len, self.probes), default=0)
        lines = [f"{title}: {word} ({self.seconds:.0f} s)"]
        lines += [f"  {name:{width}}  {result}" for name, result in self.probes.items()]
        lines += [f"{finding.probe}: {finding.sentence}" for finding in self.findings]
        return "\n".join(lines)
