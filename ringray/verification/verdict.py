"""Kinds of mistakes, and what a verification came to: findings, and what each probe says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, NamedTuple


class Mistake(NamedTuple):
    """A kind of mistakes: what it means, and what to look at next."""

    meaning: str
    advice: str


MISTAKES = {
    "own-shard": Mistake("each rank attends to its own rows only: the ring is bypassed",
        "the attention of this layer: is it routed over the ring at all"),
    "positions-restart": Mistake(
        "positions begin anew on every rank, as if each shard were a sequence",
        "position_ids: pass those of the shard; without them models count from 0"),
    "positions-contiguous": Mistake(
        "positions are those of contiguous shards, rows are dealt otherwise",
        "position_ids: deal them as the token ids are, by the same partition"),
    "positions-packed": Mistake("positions do not begin anew with each document",
        "position_ids: begin anew with each document before the batch is dealt"),
    "documents": Mistake("documents see each other: a rank does not get their boundaries",
        "cu_seqlens: the boundaries of the whole sequence, the same on every rank"),
    "batch": Mistake("rows of the batch see each other on ranks only, or in one process only",
        "dimension 0 of what is communicated: whose row of the batch does each rank read"),
    "order": Mistake("rows stand in another order than the target's shard() says",
        "the partition: shard() and the attention have to name the same one"),
    "rows-lost": Mistake("a token is on no rank, or on several",
        "shard(): each token belongs on one rank, padding on any"),
    "future": Mistake("tokens see later ones: the causal mask is that of local rows",
        "causal: it holds for places in the whole sequence, not for rows of a shard"),
    "lost-keys": Mistake("tokens do not see keys that another rank holds: a hop is left out",
        "the hops of the ring, and windows: which ranks' keys does this row see"),
    "keys-twice": Mistake(
        "some keys are counted several times: those of replicated tokens, or of a hop that is "
        "merged twice",
        "tokens that several ranks hold, and hops that are merged twice"),
    "local": Mistake(
        "the first layer that differs sees its own token only: its positions, its weights or what "
        "comes into it are others on that rank",
        "what this layer computes of a token, and the part of the batch that it reads"),
    "precision": Mistake(
        "the difference is as small as what bfloat16 rounds off: keys or values travel in a lower "
        "precision",
        "the dtype of what is communicated, and of what hops are merged in"),
    "attention": Mistake(
        "each row depends on the right tokens, but not as in one process: another scale, positions "
        "that are off, keys or values of another head or layer, or a layer that sees its own shard",
        "this layer's scale, its rotary positions, its merge of hops, and which keys and values it "
        "gets from other ranks"),
    "not-finite": Mistake("a result is not finite: rows that see no key, or a mean over nothing",
        "rows that see no key, and padding, whose maximum is -inf; counts that may be 0"),
    "no-labels": Mistake(
        "the loss of a rank without labels is not finite: it is a mean over nothing",
        "the loss: a rank without labels adds 0, and divides by the labels of all ranks"),
    "mean-of-means": Mistake(
        "the loss is the mean of the ranks' means, which weighs tokens by the number of labels on "
        "their rank",
        "the loss: divide by the labels of all ranks, as sharded_cross_entropy does"),
    "labels-in-shards": Mistake(
        "labels are shifted within each shard: the label of its last row is lost",
        "labels: shift them before the batch is dealt"),
    "labels-rolled": Mistake(
        "labels are rolled within each shard: its last row predicts its first token",
        "labels: shift them before the batch is dealt"),
    "labels-documents": Mistake("the last token of a document predicts the first one of the next",
        "labels: the last token of a document has none"),
    "divided": Mistake("it is divided by the number of ranks once too often",
        "which of DDP, FSDP and the loss divides by the ranks; if only the loss is wrong, at the "
        "constant LOSS of the target"),
    "multiplied": Mistake(
        "it is multiplied by the number of ranks: summed where it should be averaged",
        "which of DDP, FSDP and the loss sums over the ranks; if only the loss is wrong, at the "
        "constant LOSS of the target"),
    "padding-counted": Mistake("ignored or padded tokens are counted",
        "labels of padding: -100, and not counted"),
    "padding-seen": Mistake("rows that fill up a shard are seen as keys",
        "the mask: rows of padding are keys of nobody"),
    "labels-ahead": Mistake("labels further ahead than the next one are shifted within each shard",
        "labels two or more ahead: shift them before the batch is dealt"),
    "rest-divided": Mistake(
        "what the loss has beside cross entropy of the next token is divided by the number of "
        "ranks once too often",
        "the loss beside cross entropy: which parts does the loss divide by the ranks"),
    "rest-multiplied": Mistake(
        "what the loss has beside cross entropy of the next token is summed over ranks where it "
        "should be averaged",
        "the loss beside cross entropy: average it over ranks, as the rest is"),
    "router-loss": Mistake(
        "each rank has the router's loss of its own tokens: the mean of those is not that of all "
        "tokens",
        "the router's loss: sum the load of experts over ranks before it is multiplied"),
    "loss": Mistake("the loss is another one than that of one process",
        "LOSS and step(): what the ranks' losses are, parts of a sum or of a mean"),
    "not-reduced": Mistake(
        "each rank has the gradient of its own rows: nothing sums them over the ring",
        "the reduction of gradients over the ranks of the ring, not only over data"),
    "backward": Mistake(
        "the forward is right, and gradients are from there down not: backward, attention uses "
        "other keys and values than forward, or those of other ranks get no gradient",
        "the backward of attention: the keys and values that it reads, and the gradients that it "
        "sends to the ranks that hold them"),
    "gradient": Mistake("the gradient is another one than that of one process",
        "the backward of the layer that is named, and what it communicates"),
    "norm": Mistake("the norm of the gradients is not that of the whole gradient",
        "clipping: it takes the norm after the reduction, over all ranks' shards"),
    "fails": Mistake("an error of some ranks only: in a training the others wait for them for ever",
        "the traceback below"),
    "hangs": Mistake("ranks wait for ever, or not for each other",
        "the stacks below: a collective that not every rank calls, or in another order"),
    "dropout-equal": Mistake("ranks draw the same numbers for different tokens",
        "the seed of dropout: another one on each rank"),
    "step": Mistake("a step of training changes other numbers, or by another amount",
        "the optimizer's parameters: those with gradients of all ranks, each once"),
    "resume": Mistake("the state of the training is saved or loaded in part, or is another rank's",
        "what is saved: the model, the optimizer and its moments, of each rank its own"),
    "generation": Mistake("new tokens have other positions, or do not see all tokens before them",
        "position_ids of new tokens: places in the whole sequence, and the cached keys of all "
        "ranks"),
    "follows": Mistake("it may follow from what an earlier probe shows",
        "that finding first"),
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        probe: that shows it.
        mistake: the kind of mistake that would look like this, a name of ``MISTAKES``.
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
        return MISTAKES[self.mistake].advice


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
        skipped = sum(result.startswith("skipped") for result in self.probes.values())
        compared = f"{len(self.probes) - skipped} of {len(self.probes)} probes compared"
        return "\n".join([*lines, "", f"{compared}, {skipped} skipped, in {self.seconds:.0f} s"])
