"""One batch computed by one process and by all ranks, and where the results part.

Shape legend: B rows of a batch, S tokens of a row, B' and R those of one rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from ringray.verification import batches
from ringray.verification.observation import Array, Observation
from ringray.verification.world import Refused, World

# The error budget: twice the error of one process in the same dtype, against fp64, and this.
_FLOOR = 1e-6
# A gradient whose norm is a smaller share of the largest one's is measured by this share.
_SMALL_GRADIENT = 1e-2
# Inside of a model single layers err by more than its output does.
_LAYER_FACTOR = 20.0


class Origin(NamedTuple):
    """The place at which results begin to differ."""

    rank: Any = None  # an integer, if there is a place
    layer: str | None = None
    token: Any = None


def relative(got: Array | float, want: Array | float, norm: float | None = None) -> float:
    """Returns the relative norm error, infinite where something is not finite."""
    scale = float(np.linalg.norm(want)) if norm is None else norm
    error = float(np.linalg.norm(got - want)) / max(scale, 1e-30)
    return error if np.isfinite(error) else float("inf")


def cross_entropy(logits: Array, labels: Array) -> float:
    """Returns the mean over rows (B * S, V) with labels; NaN if there is none."""
    rows = torch.from_numpy(logits), torch.from_numpy(labels)
    return float(functional.cross_entropy(*rows, ignore_index=batches.IGNORED))


def whole(ranks: list[Observation], arrays: Sequence[Array | None], places: int) -> Array:
    """Puts rows (B', R, ...) of all ranks together: (B * S, ...), NaN where no rank has a row."""
    held = [(rank.rows, x) for rank, x in zip(ranks, arrays, strict=True) if x is not None]
    joined = np.full((places, *held[0][1].shape[2:]), np.nan)
    for rows, x in held:
        joined[rows[rows >= 0]] = x[rows >= 0]
    return joined


class BatchComparison:
    """Results of one process for a batch, in fp64 (``exact``) and in its own dtype (``own``), and
    what the ``ranks`` compute.

    ``leaks``: packed documents see each other in one process, whose model takes no boundaries.
    Where the ranks keep them apart, ``apart``, one process runs each document by itself.

    Raises:
        Refused: the numbers of one process are not finite.
    """

    apart = leaks = False

    def __init__(self, world: World, batch: dict[str, Array], **options: Any) -> None:
        self.world, self.batch, self.options = world, batch, options
        self.length = batch["input_ids"].shape[1]
        self.exact = world.alone(batch, exact=True, **options)
        self.own = world.alone(batch, **options)
        for reference, dtype in ((self.exact, "float64"), (self.own, "its own dtype")):
            results = [x for x in (reference.logits, reference.loss) if x is not None]
            if not all(np.isfinite(x).all() for x in results):
                raise Refused(f"one process computes numbers in {dtype} that are not finite")
        self.ranks = world.together(batch, **options)
        if "cu_seqlens" in batch and self.has_logits:
            self._choose()

    def _choose(self) -> None:
        """Runs documents by themselves, and takes that for the reference if it is another result
        than that of the packed batch, and nearer to that of the ranks."""
        try:
            exact, own = (self._joined(self.batch, exact=exact) for exact in (True, False))
        except Refused:
            return
        self.leaks = relative(exact.logits, self.exact.logits) > self.allowed
        if self.leaks and relative(self.logits, exact.logits.reshape(self.flat.shape)) < self.error:
            self.apart, self.exact, self.own = True, exact, own

    def alone(self, batch: dict[str, Array], **options: Any) -> Observation:
        """Returns what one process computes of a batch with the same documents."""
        return (self._joined if self.apart else self.world.alone)(batch, **options)

    def _joined(self, batch: dict[str, Array], **options: Any) -> Observation:
        """Returns what one process computes of each document by itself, without gradients; the
        loss is the mean cross entropy."""
        parts = [
            self.world.alone(document, **options | {"backward": False})
            for document in batches.documents(batch)
        ]
        logits = np.concatenate([x.logits for x in parts], 1)
        loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["shift_labels"].ravel())
        layers = [dict(x.layers) for x in parts]
        names = [x for x in layers[0] if all(x in other for other in layers)]
        joined = [(name, np.concatenate([x[name] for x in layers], 1)) for name in names]
        return Observation(self.exact.rows, logits, loss, layers=joined)

    @property
    def shared(self) -> bool:
        """Tells whether a sequence is dealt to several ranks; DDP deals whole ones."""
        return any(rank.rows.shape[1] < self.length for rank in self.ranks)

    # Logits.

    @property
    def has_logits(self) -> bool:
        """Tells whether one process and the ranks return logits."""
        return self.exact.logits is not None and self.ranks[0].logits is not None

    @cached_property
    def logits(self) -> Array:
        """Returns the logits of all ranks, (B * S, V), NaN where no rank has a row."""
        return whole(self.ranks, [x.logits for x in self.ranks], self.exact.rows.size)

    @property
    def flat(self) -> Array:
        """Returns the logits of one process in fp64, (B * S, V)."""
        flat: Array = self.exact.logits.reshape(-1, self.exact.logits.shape[-1])
        return flat

    @property
    def allowed(self) -> float:
        """Returns the error that is allowed of logits."""
        return 2 * relative(self.own.logits, self.exact.logits) + _FLOOR

    @property
    def error(self) -> float:
        """Returns the error of the logits of all ranks."""
        return relative(self.logits, self.flat)

    # Losses and gradients.

    @property
    def has_loss(self) -> bool:
        """Tells whether one process and the ranks return a loss."""
        return self.exact.loss is not None and self.ranks[0].loss is not None

    @property
    def loss(self) -> float:
        """Returns the loss of all ranks, of which each has its part."""
        return float(self.combined([rank.loss for rank in self.ranks if rank.loss is not None]))

    def combined(self, parts: Sequence[Any]) -> Any:
        """Returns the mean or the sum over ranks, as the target's losses are."""
        mean = self.world.facts["constants"]["LOSS"] == "mean"
        return np.mean(parts, 0) if mean else np.sum(parts, 0)

    @property
    def loss_error(self) -> float:
        """Returns the error of the loss of all ranks."""
        return relative(self.loss, self.exact.loss)

    @property
    def allowed_loss(self) -> float:
        """Returns the error that is allowed of a loss."""
        own = 2 * relative(self.own.loss, self.exact.loss) + _FLOOR
        return own if self.exact.logits is None else max(own, self.allowed)

    def gradient_errors(self, rank: Observation) -> dict[str, float]:
        """Returns the error of each gradient on a rank."""
        norms = {name: float(np.linalg.norm(x)) for name, x in self.exact.gradients.items()}
        least = _SMALL_GRADIENT * max(norms.values(), default=0.0)
        nothing = np.zeros(())
        return {
            name: relative(rank.gradients.get(name, nothing), want, max(norms[name], least))
            for name, want in self.exact.gradients.items()
        }

    @cached_property
    def allowed_gradient(self) -> float:
        """Returns the error that is allowed of a gradient."""
        return 2 * max(self.gradient_errors(self.own).values(), default=0.0) + _FLOOR

    # Where they part.

    @cached_property
    def edges(self) -> list[int]:
        """Returns the first token of each run of a rank's rows, but that of the sequence."""
        edges = set()
        for rank in self.ranks:
            columns = np.sort(rank.rows[0][rank.rows[0] >= 0] % self.length)
            edges |= {int(x) for x in columns if x and x - 1 not in columns}
        return sorted(edges)

    def holder(self, token: int) -> int:
        """Returns the rank that has a token of the first row."""
        return next(i for i, x in enumerate(self.ranks) if (x.rows % self.length == token).any())

    @cached_property
    def layers(self) -> tuple[dict[str, Array], list[dict[str, Array]]]:
        """Returns what layers give in one process and on each rank, by their names; those that all
        have, in the order in which they run."""
        options = self.options | {"layers": True}
        ranks = [dict(x.layers) for x in self.world.together(self.batch, **options)]
        alone = dict(self.alone(self.batch, **options).layers)
        names = [name for name in ranks[0] if all(name in x for x in (alone, *ranks))]
        return {name: alone[name] for name in names}, ranks

    @cached_property
    def begins(self) -> Origin:
        """Returns where the first layer that differs does so: the rank, the layer, the token."""
        alone, ranks = self.layers
        compared: list[tuple[str | None, Array, list[Array]]] = [
            (name, want, [x[name] for x in ranks]) for name, want in alone.items()
        ]
        compared.append((None, self.exact.logits, [x.logits for x in self.ranks]))
        for name, want, got in compared:
            places = [*self._wrong(name, want, got)]
            if places:
                return min(places, key=lambda x: x.token)
        return Origin()

    def _wrong(self, layer: str | None, want: Array, got: Sequence[Array]) -> Iterator[Origin]:
        """Generates the first row of each rank whose numbers differ."""
        want = want.reshape(-1, *want.shape[2:])
        limit = _LAYER_FACTOR * self.allowed * max(float(np.abs(want).max(initial=0.0)), 1e-30)
        for number, (rank, mine) in enumerate(zip(self.ranks, got, strict=True)):
            if mine.shape[2:] != want.shape[1:]:  # a part of a layer
                continue
            held = rank.rows >= 0
            gaps = np.abs(mine[held] - want[rank.rows[held]])
            wrong = ~(gaps.reshape(len(gaps), -1).max(1, initial=0.0) <= limit)
            if wrong.any():
                yield Origin(number, layer, int((rank.rows[held][wrong] % self.length).min()))
