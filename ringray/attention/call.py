"""A call of the op as records: ``Call(mask, score, strategy)``, the same on every rank.

The arguments of ``ringray.ring_attention`` that are no tensors are *settings*: a mapping from name
to value, in one order. Their names and types are those of the fields of ``Mask``, ``Score`` and
``Strategy``; so the checks here, the exchange in which ranks compare them and the schema of the
compiled operator need no list of their own.

Shape legend: B batch, Hq query heads, R the reach of a table of biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringray.base.units import plain
from ringray.traffic.mask import MOST, Mask
from ringray.tuning.lookup import Strategy
from ringray_kernels.api import Features
from ringray_kernels.checks import unusable_scale, unusable_softcap
from ringray_kernels.config import Blocks
from ringray_kernels.dropout import unusable_dropout

Slopes = tuple[tuple[float, ...], ...]  # of each head, for all batch rows or for each

_GIVEN_AS_TENSOR = {"tensor": True}


@dataclass(frozen=True)
class Score:
    """Rule by which scores and weights follow from q . k. Tensors are described: the ranks agree
    on their values or shapes, and they travel beside the record (``TensorArguments``)."""

    #: Factor on q . k, 1 / sqrt(D) unless another is given.
    scale: float | None = None

    #: Scores s become softcap * tanh(s / softcap), after the scale.
    softcap: float | None = None

    #: Share of the weights that are dropped. The seed differs from call to call.
    dropout_p: float = 0.0

    #: ``fp8``: q, k and v travel and are multiplied in 8 bits.
    quantize: str | None = None

    #: Whether each head has a logit without a value in its softmax.
    sinks: bool = field(default=False, metadata=_GIVEN_AS_TENSOR)

    #: Argument that biases scores, and what describes it: values of slopes, sizes of others.
    bias: tuple[str, Any] | None = field(default=None, metadata=_GIVEN_AS_TENSOR)

    def bias_by(self, name: str) -> Any:
        """Returns what describes the bias by that argument, None if scores have no such bias."""
        return None if self.bias is None or self.bias[0] != name else self.bias[1]

    def features(self, value_dim: int) -> Features:
        """Returns the demands on a backend."""
        biased, quantized = self.bias is not None, self.quantize is not None
        return Features(value_dim, self.softcap, biased, self.dropout_p > 0, quantized)


class InputSizes(NamedTuple):
    """Sizes and kind of q (B, Hq, S, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv): all that a problem
    takes from them."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> InputSizes:
        """Returns those of tensors whose shapes fit each other (``check_qkv``).

        Raises:
            ValueError: k has another number of rows than q.
        """
        batch, heads, rows, head_dim = q.shape
        if k.shape[2] != rows:
            raise ValueError(f"k: got {k.shape[2]} rows, expected q's {rows}: shards are equal")
        return cls(batch, heads, k.shape[1], rows, head_dim, v.shape[3], q.dtype, q.device)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns q's shape."""
        return self.batch, self.heads, self.rows, self.head_dim


@dataclass(frozen=True)
class Call:
    """The settings of one call, checked, with every choice made."""

    mask: Mask
    score: Score
    strategy: Strategy
    return_lse: bool = False


def _types() -> dict[str, str]:
    """Returns the settings and their types, as the fields are annotated."""
    of_mask = {item.name: item.type for item in fields(Mask) if not item.metadata}
    of_score = {item.name: item.type for item in fields(Score) if not item.metadata}
    of_strategy = {item.name: item.type for item in fields(Strategy) if item.name != "source"}
    every = of_mask | {"seq_len": "int | None"} | of_score | of_strategy | {"return_lse": "bool"}
    return {name: str(annotation) for name, annotation in every.items()}


TYPES = _types()
SETTINGS = tuple(TYPES)
DEFAULTS = {
    name: None if name == "seq_len" else item.default
    for record in (Mask, Score, Strategy, Call)
    for name, item in record.__dataclass_fields__.items()
    if name in TYPES
}


_PLAIN = (bool, int, float, str, type(None))  # of the values of almost all calls


def read(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with Python's numbers in place of NumPy's and of 0-d tensors, and tuples in
    place of lists."""
    return {
        name: value if type(value) in _PLAIN else several(value)
        for name, value in arguments.items()
    }


def several(value: Any) -> Any:
    """Returns a list or a tuple of numbers as a tuple, and one number as it is."""
    if isinstance(value, list | tuple):
        return tuple([plain(x) for x in value])
    return plain(value)


def mistake(settings: Mapping[str, Any]) -> str | None:
    """Returns the first setting that is of another type, or a number that no score has, or None.
    The bounds of masks are those of ``Mask``: they need no compiler, which knows types only."""
    for name, annotation in TYPES.items():
        if wrong := _mistyped(name, annotation, settings[name]):
            return wrong
    if settings["quantize"] not in (None, "fp8"):
        return f"quantize: got {settings['quantize']!r}, expected None or 'fp8'"
    scale, softcap, dropout_p = (settings[name] for name in ("scale", "softcap", "dropout_p"))
    wrong = None if scale is None else unusable_scale(scale)
    return wrong or unusable_softcap(softcap) or unusable_dropout(dropout_p, None)


def _mistyped(name: str, annotation: str, value: Any) -> str | None:
    """Returns why ``value`` is not of the annotated type, or None."""
    match annotation:
        case "bool":
            fits, expected = isinstance(value, bool), "True or False"
        case "int | None":
            fits = value is None or whole(value)
            expected = "None or an integer of at least 1"
        case "Window":
            sides = isinstance(value, tuple) and len(value) == 2
            if sides:
                fits = all(side is None or whole(side, 0) for side in value)
                expected = "two integers of at least 0, None for all keys"
            else:
                fits = value is None or whole(value, 0)
                expected = "None or an integer of at least 0 or (left, right)"
        case "Lengths":
            lengths = value if isinstance(value, tuple) else (value,)
            fits = value is None or all(whole(x, 0) for x in lengths)
            expected = "an integer of at least 0, or a list of them"
        case "Cut":
            fits = value is None or isinstance(value, Blocks) or whole(value)
            expected = "None, an integer or a ringray.Blocks"
        case _:
            return None
    return None if fits else f"{name}: got {value!r}, expected {expected}"


def unnamed(settings: Mapping[str, Any]) -> str | None:
    """Returns the first setting that is no text where a name is expected, or None. A compiler asks;
    an eager call looks names up, and an error lists the valid ones."""
    for name, annotation in TYPES.items():
        if annotation == "str" and not isinstance(settings[name], str):
            return f"{name}: got {settings[name]!r}, expected a name"
    return None


def whole(value: object, least: int | None = None) -> bool:
    """Tells whether ``value`` is an integer, of at least ``least``."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    return integer and (least is None or least <= value < MOST)  # type: ignore[operator]
