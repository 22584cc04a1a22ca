"""Wrong arguments are told what was given and what is expected, whatever the backend."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ringray_kernels import State, testing
from ringray_kernels.api import backend_names, backward, forward, resolve_backend
from ringray_kernels.backends import BACKENDS


def good() -> dict[str, Any]:
    q, k, v, _ = testing.make_inputs(2, 4, 2, 8, 16, torch.float32, seed=0)
    start = torch.zeros(1, 8, dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "start": start, "end": start + 8, "scale": 0.25}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"q": [1.0]}, "q: got list, expected a tensor"),
    "mixed dtypes": (
        {"k": torch.zeros(2, 2, 8, 16).bfloat16()}, "k: got torch.bfloat16 on cpu, expected q's",
    ),
    "empty": ({"q": torch.zeros(2, 4, 0, 16)}, "q: got an empty tensor of shape (2, 4, 0, 16)"),
    "batch": ({"k": torch.zeros(3, 2, 8, 16)}, "k: got shape (3, 2, 8, 16), expected (2, 2, 8"),
    "heads": (
        {"k": torch.zeros(2, 3, 8, 16), "v": torch.zeros(2, 3, 8, 16)},
        "heads: got 4 query heads and 3 key/value heads",
    ),
    "start's rows": ({"start": torch.zeros(1, 9, dtype=torch.int32)}, "start: got shape (1, 9)"),
    "blocks": ({"blocks": 0}, "blocks: got 0, backend 'aten' takes None or query rows per call"),
    "backend": ({"backend": "atn"}, "backend: got 'atn', expected one of auto, "),
    "device": (
        {"start": torch.zeros(1, 8, dtype=torch.int32, device="meta")},
        "start: got a tensor on meta, expected cpu",
    ),
    "head dim": (
        {name: torch.zeros(1, 1, 8, 513) for name in ("q", "k", "v")},
        "head dim: got 513, expected at most 512",
    ),
    "head dim of v": ({"v": torch.zeros(2, 2, 8, 600)}, "head dim: got 600, expected at most 512"),
    "state": (
        {"state": State(torch.zeros(2, 4, 8, 8), torch.zeros(2, 4, 8))},
        "state.out: got shape (2, 4, 8, 8), expected (2, 4, 8, 16)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_told(case: str) -> None:
    changes, says = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(says)):
        forward(**{**good(), **changes})


@pytest.mark.parametrize("softcap", [0, 1e-31, float("nan"), True, "50"])
def test_softcaps_that_cap_nothing_are_refused(softcap: object) -> None:
    says = f"softcap: got {softcap!r}, expected None or a finite number of at least 1e-30"
    with pytest.raises(ValueError, match=re.escape(says)):
        forward(**good(), softcap=softcap)  # type: ignore[arg-type]


def test_wrong_arguments_of_backward_are_told() -> None:
    fine = good()
    shapes = {"lse": (2, 4, 8), "delta": (2, 4, 8), "dk": (2, 2, 8, 16), "dv": (2, 2, 8, 16)}
    names = ("dout", "out", "lse", "delta", "dq", "dk", "dv")
    tensors = {name: torch.zeros(shapes.get(name, (2, 4, 8, 16))) for name in names}
    backward(**fine, **tensors)
    for name, x in tensors.items():
        for wrong, says in (
            (torch.zeros(1), r"got shape \(1,\), expected \("),
            (x.double(), "got torch.float64, expected torch.float32"),
            (x.to("meta"), "got a tensor on meta, expected cpu"),
        ):
            with pytest.raises(ValueError, match=f"{name}: {says}"):
                backward(**fine, **{**tensors, name: wrong})


def test_auto_is_a_registered_backend() -> None:
    assert backend_names() == ("auto", *BACKENDS)
    assert resolve_backend("auto", torch.zeros(1, 1, 1, 16)) in BACKENDS
    with pytest.raises(ValueError, match="did you mean 'reference'"):
        resolve_backend("referense", torch.zeros(1, 1, 1, 16))
