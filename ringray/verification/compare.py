"""One batch computed by one process and by all ranks, and where the results part."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ringray.verification.observation import Array, Observation
from ringray.verification.world import World

# The error budget: twice the error of one process in the same dtype, against fp64, and this.
_FLOOR = 1e-6
# A gradient whose norm is a smaller share of the largest one's is measured by this share.
_SMALL_GRADIENT = 1e-2
# Inside of a model single layers err by more than its output does.
_LAYER_FACTOR = 20.0


class Origin(NamedTuple):
    """Where results begin to differ."""

    rank: int | None
    layer: str | None
    token: int | None

    def __str__(self) -> str:
        parts = [f"rank {self.rank}"] if self.rank is not None else []
        parts += [f"layer {self.layer}"] if self.layer is not None else []
        parts += [f"token {self.token}"] if self.token is not None else []
        return ", ".join(parts) or "everywhere"


def relative(got: Array, want: Array, norm: float | None = None) -> float:
    """Returns the relative norm error, infinite where something is not finite."""
    scale = float(np.linalg.norm(want)) if norm is None else norm
    error = float(np.linalg.norm(got - want)) / max(scale, 1e-30)
    return error if np.isfinite(error) else float("inf")


def whole(ranks: list[Observation], arrays: list[Array], places: int) -> Array:
    """Puts rows (B', R, ...) of all ranks together: (B * S, ...), NaN where no rank has a row."""
    joined = np.full((places, *arrays[0].shape[2:]), np.nan)
    for rank, rows in zip(ranks, arrays, strict=True):
        held = rank.rows >= 0
        joined[rank.rows[held]] = rows[held]
    return joined


class Compared:
    """What one process computes of a batch, in fp64 (``exact``) and in its own dtype (``own``), and
    what the ``ranks`` compute."""

    def __init__(self, world: World, batch: dict[str, Array], **options: Any) -> None:
        self.world, self.batch, self.options = world, batch, options
        self.exact = world.alone(batch, exact=True, **options)
        self.own = world.alone(batch, **options)
        self.ranks = world.together(batch, **options)
        self.length = batch["input_ids"].shape[1]

    @property
    def shared(self) -> bool:
        """Tells whether a sequence is dealt to several ranks; DDP deals whole ones."""
        return any(
            len(rank.rows) and (rank.rows[0] // self.length).size < self.length
            for rank in self.ranks
        )

    # Logits.

    @cached_property
    def logits(self) -> Array:
        """Returns the logits of all ranks, (B * S, V), NaN where no rank has a row."""
        arrays = [rank.logits for rank in self.ranks if rank.logits is not None]
        assert self.exact.logits is not None
        return whole(self.ranks, arrays, self.exact.logits[..., 0].size)

    @cached_property
    def allowed(self) -> float:
        """Returns the error that is allowed of logits."""
        assert self.own.logits is not None
        return 2 * relative(self.own.logits, self.exact.logits) + _FLOOR  # type: ignore[arg-type]

    @cached_property
    def error(self) -> float:
        """Returns the error of the logits of all ranks."""
        return relative(self.logits, self.flat)

    @property
    def flat(self) -> Array:
        """Returns the logits of one process in fp64, (B * S, V)."""
        assert self.exact.logits is not None
        return self.exact.logits.reshape(-1, self.exact.logits.shape[-1])

    def error_of(self, variant: Observation) -> float:
        """Returns the error of the logits of all ranks against another computation's."""
        assert variant.logits is not None
        return relative(self.logits, variant.logits.reshape(self.flat.shape))

    # Losses and gradients.

    @property
    def loss(self) -> float:
        """Returns the loss of all ranks, of which each has its part."""
        parts = [rank.loss for rank in self.ranks if rank.loss is not None]
        mean = self.world.facts["constants"]["LOSS"] == "mean"
        return float(np.mean(parts) if mean else np.sum(parts))

    @property
    def losses_differ(self) -> bool:
        """Tells whether the loss of all ranks is another one than that of one process."""
        assert self.exact.loss is not None
        return not abs(self.loss - self.exact.loss) <= self.allowed_loss * abs(self.exact.loss)

    @property
    def allowed_loss(self) -> float:
        """Returns the error that is allowed of a loss."""
        own, exact = self.own.loss, self.exact.loss
        assert own is not None
        assert exact is not None
        mine = abs(own - exact) / max(abs(exact), 1e-30)
        logits = 0.0 if self.exact.logits is None else self.allowed
        return max(2 * mine + _FLOOR, logits)

    def gradient_errors(self, rank: Observation) -> dict[str, float]:
        """Returns the error of each gradient on a rank."""
        return self._errors(rank.gradients)

    @cached_property
    def allowed_gradient(self) -> float:
        """Returns the error that is allowed of a gradient."""
        return 2 * max(self._errors(self.own.gradients).values(), default=0.0) + _FLOOR

    def _errors(self, gradients: dict[str, Array]) -> dict[str, float]:
        norms = {name: float(np.linalg.norm(x)) for name, x in self.exact.gradients.items()}
        least = _SMALL_GRADIENT * max(norms.values(), default=0.0)
        nothing = np.zeros(())
        return {
            name: relative(gradients.get(name, nothing), want, max(norms[name], least))
            for name, want in self.exact.gradients.items()
        }

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

    def begins(self) -> Origin:
        """Returns where the first layer that differs does so: the rank, the layer, the token."""
        own = self.world.alone(self.batch, **self.options, layers=True)
        ranks = self.world.together(self.batch, **self.options, layers=True)
        alone = dict(own.layers)
        for name, _ in ranks[0].layers:
            if name not in alone:
                continue
            rows = alone[name].reshape(own.rows.size, *alone[name].shape[2:])
            if place := self._first_row(ranks, name, rows):
                return place
        return next(self._rows_of(self.ranks, None), Origin(None, None, None))

    def _first_row(self, ranks: list[Observation], name: str, rows: Array) -> Origin | None:
        scale = float(np.abs(rows).max()) if rows.size else 0.0
        first: Origin | None = None
        for number, rank in enumerate(ranks):
            mine = dict(rank.layers).get(name)
            if mine is None or mine.shape[2:] != rows.shape[1:]:
                continue
            held = rank.rows >= 0
            gaps = np.abs(mine[held] - rows[rank.rows[held]])
            gaps = gaps.reshape(len(gaps), -1).max(1, initial=0.0)
            wrong = ~(gaps <= _LAYER_FACTOR * self.allowed * max(scale, 1e-30))
            if wrong.any():
                token = int((rank.rows[held][wrong] % self.length).min())
                if first is None or (first.token is not None and token < first.token):
                    first = Origin(number, name, token)
        return first

    def _rows_of(self, ranks: list[Observation], layer: str | None) -> Iterator[Origin]:
        """Generates the first row of each rank whose logits differ."""
        scale = float(np.abs(self.flat).max())
        for number, rank in enumerate(ranks):
            held = rank.rows >= 0
            assert rank.logits is not None
            gaps = np.abs(rank.logits[held] - self.flat[rank.rows[held]]).max(-1, initial=0.0)
            wrong = ~(gaps <= _LAYER_FACTOR * self.allowed * scale)
            if wrong.any():
                yield Origin(number, layer, int((rank.rows[held][wrong] % self.length).min()))
