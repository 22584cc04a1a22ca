"""What a verification came to: findings, and what each probe says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

# What to look at next, by the kind of mistake.
ADVICE = {
    "own-shard": "the attention of this layer: is it routed over the ring at all",
    "positions-restart": "position_ids: pass those of the shard; without them models count from 0",
    "positions-contiguous": "position_ids: deal them as the token ids are, by the same partition",
    "positions-packed": "position_ids: begin anew with each document before the batch is dealt",
    "documents": "cu_seqlens: the boundaries of the whole sequence, the same on every rank",
    "order": "the partition: shard() and the attention have to name the same one",
    "rows-lost": "shard(): each token belongs on one rank, padding on any",
    "future": "causal: it holds for places in the whole sequence, not for rows of a shard",
    "lost-keys": "the hops of the ring, and windows: which ranks' keys does this row see",
    "attention": "the scale, the merge of hops, and the rotary positions of this layer",
    "not-finite": "rows that see no key, and padding: their maximum is -inf",
    "mean-of-means": "the loss: divide by the labels of all ranks, as sharded_cross_entropy does",
    "labels-in-shards": "labels: shift them before the batch is dealt",
    "labels-rolled": "labels: shift them before the batch is dealt",
    "labels-documents": "labels: the last token of a document has none",
    "divided": "gradients and losses: which of DDP, FSDP and the loss divides by the ranks",
    "multiplied": "gradients and losses: which of DDP, FSDP and the loss sums over the ranks",
    "padding-counted": "labels of padding: -100, and not counted",
    "loss": "LOSS and step(): what the ranks' losses are, parts of a sum or of a mean",
    "not-reduced": "the reduction of gradients over the ranks of the ring, not only over data",
    "gradient": "the backward of the layer that is named, and what it communicates",
    "norm": "clipping: it takes the norm after the reduction, over all ranks' shards",
    "keys-twice": "tokens that several ranks hold, and hops that are merged twice",
    "padding-seen": "the mask: rows of padding are keys of nobody",
    "labels-ahead": "labels two or more ahead: shift them before the batch is dealt",
    "rest-divided": "the loss beside cross entropy: which parts does the loss divide by the ranks",
    "rest-multiplied": "the loss beside cross entropy: average it over ranks, as the rest is",
    "router-loss": "the router's loss: sum the load of experts over ranks before it is multiplied",
    "backward": "the backward of attention: the keys and values that it reads, and the gradients "
    "that it sends to the ranks that hold them",
    "dropout-equal": "the seed of dropout: another one on each rank",
    "step": "the optimizer's parameters: those with gradients of all ranks, each once",
    "resume": "what is saved: the model, the optimizer and its moments, of each rank its own",
    "generation": "position_ids of new tokens: places in the whole sequence, and the cached keys "
    "of all ranks",
    "follows": "the finding before it first",
    "fails": "the traceback below",
    "hangs": "the stacks below: a collective that not every rank calls, or in another order",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        probe: that shows it.
        mistake: the kind of mistake that would look like this, a name of ``mistakes.MISTAKES``.
        sentence: what differs, in words, with the kind of mistake.
        rank, layer, token: where it begins; None where that has no meaning.
        error, allowed: relative, None where nothing was compared.
        details: of a failure, its traceback and the stacks of ranks.
    """

    probe: str
    mistake: str
    sentence: str
    rank: int | None = None
    layer: str | None = None
    token: int | None = None
    error: float | None = None
    allowed: float | None = None
    details: str = ""

    @property
    def place(self) -> str:
        """Returns where it begins, in words, or ""."""
        named = {"rank": self.rank, "layer": self.layer, "token": self.token}
        return ", ".join(f"{name} {x}" for name, x in named.items() if x is not None)

    @property
    def advice(self) -> str:
        """Returns what to look at next."""
        return ADVICE.get(self.mistake, "the layer or the probe that is named first")


@dataclass
class Verdict:
    """The result of a verification.

    ``probes``: name -> ``right``, ``wrong``, or ``skipped: `` with the reason; ``notes``: what else
    a user has to know of the results.
    """

    target: str
    adapter: str
    ranks: int
    probes: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Tells whether nothing was found."""
        return not self.findings

    @property
    def exit_code(self) -> int:
        """Returns that of the command: 0 right, 1 wrong."""
        return 0 if self.right else 1

    @property
    def title(self) -> str:
        """Returns the result in a line."""
        kinds = dict.fromkeys(x.mistake for x in self.findings if x.mistake != "follows")
        result = "right" if self.right else f"WRONG: {', '.join(kinds)}"
        return f"{self.target} on {self.ranks} ranks, by {self.adapter}: {result}"

    def as_json(self) -> dict[str, Any]:
        """Returns plain data; an error that is not finite is null."""
        data: dict[str, Any] = asdict(self) | {"right": self.right}
        for finding in data["findings"]:
            if not isfinite(finding["error"] or 0.0):
                finding["error"] = None
        return data

    def __str__(self) -> str:
        width = max(map(len, self.probes), default=0)
        lines = [self.title, ""]
        lines += [f"  {name:{width}}  {result}" for name, result in self.probes.items()]
        lines += [f"\nnote: {note}" for note in self.notes]
        for finding in self.findings:
            where = f" ({finding.place})" if finding.place else ""
            lines += ["", f"{finding.probe}{where}: {finding.sentence}"]
            lines += [f"  look at {finding.advice}"]
            lines += [f"  | {line}" for line in finding.details.splitlines()]
        return "\n".join([*lines, "", f"{len(self.probes)} probes in {self.seconds:.0f} s"])
