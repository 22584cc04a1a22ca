"""Keywords of other libraries, which docs/coming-from.md promises an answer to."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import ringray

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
TABLE = PAGE.read_text(encoding="utf-8").partition("## Names that differ")[2].partition("\n## ")[0]
FIRST = " ".join(line.split(" | ")[0] for line in TABLE.splitlines() if line.startswith("| `"))
NAMES = sorted(
    set(re.findall(r"`([a-z_]+)(?:=[^`]*)?`", FIRST))
    - set(inspect.signature(ringray.ring_attention).parameters)
)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_page_is_answered(name: str) -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=f"unexpected keyword '{name}'; ringray calls it"):
        ringray.ring_attention(q, q, q, **{name: None})  # type: ignore[arg-type]


def test_the_page_has_names() -> None:
    assert len(NAMES) > 15
