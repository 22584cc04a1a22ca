"""The selection of sweeps by name or by the start of their digest."""

from __future__ import annotations

import re
from collections.abc import Iterable


def selected(selector: str, sweeps: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the digests of the sweeps that ``selector`` means, in the given order.

    Args:
        selector: a name, or if no sweep has it, the first 4 or more digits of a digest.
        sweeps: names and digests.
    """
    pairs = list(dict.fromkeys(sweeps))
    named = [digest for name, digest in pairs if name == selector]
    prefix = selector.lower()
    if named or not re.fullmatch(r"[0-9a-f]{4,64}", prefix):
        return named
    return [digest for _, digest in pairs if digest.startswith(prefix)]
