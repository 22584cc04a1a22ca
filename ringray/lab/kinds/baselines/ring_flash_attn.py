"""The package ring-flash-attn on the same ring: its ring over blocks r and 2N - 1 - r."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from ringray.base.errors import UserError, reason_of
from ringray.lab.kinds.base import RankContext
from ringray.lab.trial.config import TrialConfig

_PACKAGE = "ring_flash_attn"


def prepare(
    config: TrialConfig, context: RankContext, q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor]:
    """Returns a function that attends to this rank's shard; tensors are (B, S, H, D)."""
    try:
        package: Any = importlib.import_module(_PACKAGE)
    except ImportError as error:
        raise UserError(
            "measure.baseline: ring-flash-attn cannot be imported on this rank "
            f"({reason_of(error)}), expected the packages ring-flash-attn and flash-attn in "
            "its environment"
        ) from error

    def attend() -> Tensor:
        return cast(
            "Tensor", package.zigzag_ring_flash_attn_func(q, k, v, causal=True, group=context.group)
        )

    return attend
