"""Tensor arguments beside q, k and v: boundaries of documents, and what scores are changed by.

Shape legend: B batch, Hq query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringray import transport as transports
from ringray.attention.call import InputSizes, Slopes
from ringray.base.units import plain
from ringray_kernels.checks import TensorKind, not_plain
from ringray_kernels.intervals import derived
from ringray_kernels.merge import sink_gradients

BIASES = ("alibi_slopes", "distance_bias", "attn_bias")  # of which a call has one at most
MOST_SLOPE = 1e12  # in size: its product with any distance stays far from the end of fp32
MOST_POSITIONS = 1 << 31  # of one sequence: kernels take 32 bits for a position
_EXPECTED = (
    f"expected None, or finite numbers of at most {MOST_SLOPE:g} in size: one for each query head, "
    "or a row of them for each batch row; a bias is a function of the distance of two positions"
)


class TensorArguments(NamedTuple):
    """The tensor arguments of ``ringray.ring_attention`` beside q, k and v, as given; and for a
    compiler the token of what ``ringray.deal`` returned (``attention.deal.spoken``)."""

    cu_seqlens: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    distance_bias: Tensor | None = None
    attn_bias: Tensor | None = None
    dealt: Tensor | None = None

    @property
    def parameters(self) -> ScoreParameters:
        """Returns those that have gradients."""
        return ScoreParameters(self.sinks, self.distance_bias, self.attn_bias)

    def check(
        self, sizes: InputSizes, slopes: Slopes | None, settings: Mapping[str, Any], ranks: int
    ) -> None:
        """Raises ValueError unless they fit q, k and v of ``sizes`` and the settings, which are
        checked. ``slopes``: values of those given."""
        check_sinks(self.sinks, sizes)
        check_table(self.distance_bias, sizes)
        check_slopes(slopes, sizes.batch, sizes.heads, sizes.rows * ranks)
        check_pairs(self.attn_bias, sizes, settings, ranks)
        names = [name for name in BIASES if getattr(self, name) is not None]
        if len(names) > 1:
            raise ValueError(f"{names[1]}: got {names[0]} too, expected one bias of scores")

    def described(self, slopes: Slopes | None) -> dict[str, Any]:
        """Returns the fields of ``Score`` that describe them."""
        bias: tuple[str, Any] | None = None if slopes is None else ("alibi_slopes", slopes)
        if self.distance_bias is not None:
            bias = "distance_bias", self.distance_bias.shape[1]
        if self.attn_bias is not None:
            bias = "attn_bias", tuple(self.attn_bias.shape)
        return {"sinks": self.sinks is not None, "bias": bias}


class ScoreParameters(NamedTuple):
    """Learned parameters of scores, on every rank: sinks (Hq,), and a table of biases by distance
    (Hq, 2 R + 1); and biases of this rank's rows (B or 1, Hq or 1, S, N * S)."""

    sinks: Tensor | None = None
    distance_bias: Tensor | None = None
    attn_bias: Tensor | None = None

    def bias(self, *, with_gradient: bool = False) -> tuple[Tensor, ...]:
        """Returns ``Bias.values`` of all rows and heads, and zeros for their gradient; nothing
        without a learned bias."""
        if self.attn_bias is not None:
            values = self.attn_bias.contiguous()
        elif self.distance_bias is not None:
            values = self.distance_bias.float().contiguous().unsqueeze(0)
        else:
            return ()
        if not with_gradient:
            return (values,)
        return values, torch.zeros_like(values, dtype=torch.float32)

    def share(self, parts: int, place: int) -> ScoreParameters:
        """Returns the values of one of some equal parts of the heads."""
        return ScoreParameters(*(None if x is None else x.chunk(parts)[place] for x in self))

    def gradients(self, lse: Tensor, delta: Tensor, bias: tuple[Tensor, ...]) -> list[Tensor]:
        """Returns this rank's shares, fp32, of the gradients of what there is. ``bias``: with
        gradient."""
        sinks = [] if self.sinks is None else [sink_gradients(self.sinks, lse, delta)]
        return [*sinks, *(x.squeeze(0) if x.dim() == 3 else x for x in bias[1:])]


def _check(name: str, x: Any, q: TensorKind, expected: str, fits: Callable[[Tensor], bool]) -> None:
    """Raises ValueError unless ``x`` is a plain tensor that fits, in a dtype for ``q``, beside
    it."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: got {type(x).__name__}, {expected}")
    if reason := not_plain(x):
        raise ValueError(f"{name}: got {reason}")
    if x.dtype not in (torch.float32, q.dtype) or x.device != q.device or not fits(x):
        raise ValueError(
            f"{name}: got {x.dtype} of shape {tuple(x.shape)} on {x.device}, {expected}"
        )


def check_sinks(sinks: Tensor | None, q: TensorKind) -> None:
    """Raises ValueError unless ``sinks`` is None or a logit per head of ``q`` (B, Hq, S, D)."""
    if sinks is None:
        return
    expected = f"expected None or a tensor ({q.shape[1]},) of float32 or q's {q.dtype}, {q.device}"
    _check("sinks", sinks, q, expected, lambda x: tuple(x.shape) == (q.shape[1],))


def check_table(table: Tensor | None, q: TensorKind) -> None:
    """Raises ValueError unless ``table`` is None or one of biases for ``q`` (B, Hq, S, D)."""
    if table is None:
        return
    expected = (
        f"expected None or a tensor ({q.shape[1]}, 2 R + 1) of float32 or q's {q.dtype}, {q.device}"
        ": a bias for each head and distance from -R to R; it is a function of distances alone"
    )
    _check(
        "distance_bias",
        table,
        q,
        expected,
        lambda x: x.dim() == 2 and len(x) == q.shape[1] and x.shape[1] % 2 == 1,
    )


def check_pairs(
    bias: Tensor | None, sizes: InputSizes, settings: Mapping[str, Any], ranks: int
) -> None:
    """Raises ValueError unless ``bias`` is None or one of the pairs of this rank's rows and all
    positions, and rows stay where they are."""
    if bias is None:
        return
    batch, heads, rows = sizes.shape[:3]
    expected = (
        f"expected None or a tensor ({_or_1(batch)}, {_or_1(heads)}, {rows}, {rows * ranks}) of "
        f"float32 or q's {sizes.dtype}, {sizes.device}: a bias for each of this rank's rows and "
        "each global position, padding included"
    )
    shapes = {(b, h, rows, rows * ranks) for b in (1, batch) for h in (1, heads)}
    _check("attn_bias", bias, sizes, expected, lambda x: tuple(x.shape) in shapes)
    name = settings["transport"]
    if name == "auto" or transports.plan(name, ranks, heads, sizes.kv_heads).fold > 1:
        raise ValueError(
            f"attn_bias: got transport {name!r}, with which heads may change ranks, expected one "
            "with which they stay: ring, bidirectional, direct, allgather, double-ring or staged"
        )
    if settings["backward"] == "query-side":
        raise ValueError(
            "attn_bias: got backward 'query-side', with which queries travel, expected auto, "
            "planned or reverse: a rank has the biases of its own rows"
        )


def _or_1(size: int) -> str:
    return "1" if size == 1 else f"{size} or 1"


def check_values(tensors: TensorArguments) -> None:
    """Raises ValueError if a table holds values that are not finite. Those on a device are not
    read."""
    table: Any = tensors.distance_bias
    readable = isinstance(table, Tensor) and table.device.type == "cpu" and not not_plain(table)
    if readable and not table.isfinite().all():
        raise ValueError("distance_bias: got values that are not finite, expected finite numbers")


def mistyped(tensors: TensorArguments) -> str | None:
    """Returns why an operator cannot take one of ``tensors``, whatever its values, or None."""
    cu_seqlens: object = tensors.cu_seqlens
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        return f"cu_seqlens: got {cu_seqlens!r}, expected integers in a tensor or a list"
    for name, x in tensors.parameters._asdict().items():
        if x is not None and not isinstance(x, Tensor):
            return f"{name}: got {type(x).__name__}, expected None or a tensor"
    return None if tensors.alibi_slopes is None else mistaken_slopes(tensors.alibi_slopes)


def numbers(values: Any) -> Any:
    """Returns a list or an array of numbers as a tensor, fp32, and anything else as it is."""
    if values is None or isinstance(values, Tensor):
        return values
    try:
        rows = [
            [float(plain(x)) for x in row] if isinstance(row, list | tuple) else row
            for row in values
        ]
        return torch.tensor(rows, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return values


def mistaken_slopes(slopes: Any) -> str | None:
    """Returns why ``given`` holds no slopes, whatever their values, or None."""
    if not isinstance(slopes, Tensor):
        return f"alibi_slopes: got {slopes!r}, {_EXPECTED}"
    if reason := not_plain(slopes):
        return f"alibi_slopes: got {reason}"
    if slopes.dim() not in (1, 2) or not slopes.is_floating_point():
        return f"alibi_slopes: got {slopes.dtype} of shape {tuple(slopes.shape)}, {_EXPECTED}"
    if slopes.requires_grad and torch.is_grad_enabled():
        return (
            "alibi_slopes: got a tensor that requires a gradient, expected constants: slopes have "
            "none; give slopes.detach()"
        )
    return None


def head_slopes(slopes: Tensor | None) -> Slopes | None:
    """Returns the values of slopes (Hq,) or (B, Hq), rounded to fp32. A tensor on a device is read
    once, and again after it has changed.

    Raises:
        ValueError: they are no slopes; what was given and what is expected.
    """
    if slopes is None:
        return None
    if wrong := mistaken_slopes(slopes):
        raise ValueError(wrong)

    def values() -> Slopes:
        return tuple(map(tuple, slopes.detach().float().reshape(-1, slopes.shape[-1]).tolist()))

    by_row = values() if slopes.device.type == "cpu" else derived(slopes, slopes, "values", values)
    for slope in (x for row in by_row for x in row):
        if not abs(slope) <= MOST_SLOPE:  # nor NaN
            raise ValueError(f"alibi_slopes: got {slope}, {_EXPECTED}")
    return by_row


def check_slopes(slopes: Slopes | None, batch: int, heads: int, positions: int) -> None:
    """Raises ValueError unless ``slopes`` fit ``heads`` query heads and the ``batch``."""
    if slopes is None:
        return
    if len(slopes) not in (1, batch) or len(slopes[0]) != heads:
        shape = f"({len(slopes[0])},)" if len(slopes) == 1 else f"({len(slopes)}, {len(slopes[0])})"
        raise ValueError(
            f"alibi_slopes: got shape {shape}, expected ({heads},) or ({batch}, {heads}): a slope "
            "for each query head, or a row of them for each batch row"
        )
    if positions > MOST_POSITIONS:
        raise ValueError(
            f"alibi_slopes: got {positions} positions, expected at most {MOST_POSITIONS}"
        )


def share(slopes: Slopes | None, fold: int, place: int) -> Slopes | None:
    """Returns the slopes of the heads that a rank computes, the ``place``-th of ``fold`` parts."""
    if slopes is None or fold == 1:
        return slopes
    count = len(slopes[0]) // fold
    return tuple(row[place * count : (place + 1) * count] for row in slopes)
