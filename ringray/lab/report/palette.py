"""Colours of figures and pages, each for light and dark paper, told apart by colour-blind readers.

Figures name colours as variables of CSS, which a page sets for both; a picture that stands alone
has the light ones. Imports nothing heavy.
"""

from __future__ import annotations

import re

VEGA_LITE = "6.4"  # version of the charts
# Name -> on white, on black. Contrast with the paper: 4.5 for text, 3 for lines and marks.
PALETTE: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#15181d"),
    "ink": ("#1a1a1a", "#e9ebee"),
    "pale": ("#595959", "#a8b0ba"),
    "rule": ("#e0e0e0", "#333a44"),
    "shade": ("#f4f6f8", "#1d2229"),
    "link": ("#0055a4", "#7db8ff"),
    "good": ("#1b6e2f", "#6fd08c"),
    "bad": ("#b3261e", "#ff9a8d"),
    "back": ("#8a8a8a", "#8d96a1"),  # what others are compared with
    "c1": ("#0072b2", "#56b4f0"),
    "c2": ("#c8401a", "#ff8a66"),
    "c3": ("#117a4d", "#4fd0a0"),
    "c4": ("#a0408f", "#e69ad8"),
    "c5": ("#946200", "#f0b840"),
    "c6": ("#007f86", "#45d3d8"),
    "c7": ("#4b3cc0", "#a99dff"),
    "c8": ("#5c5c1f", "#cfcf72"),
    # A longer sequence stands out more.
    "s1": ("#9ecae1", "#2b4c6a"),
    "s2": ("#4a94c4", "#3b78ab"),
    "s3": ("#2171b5", "#62aee6"),
    "s4": ("#08306b", "#c6e2fb"),
    "pale1": ("#8fbfdd", "#2d6d99"),  # a light form of c1: another pass of the same thing
}
LINES = tuple(f"var(--c{number})" for number in range(1, 9))


def colour(name: str) -> str:
    """Returns a colour as CSS names it."""
    assert name in PALETTE
    return f"var(--{name})"


def light(text: str) -> str:
    """Returns ``text`` with the colours for white paper in place of variables."""
    return re.sub(r"var\(--(\w+)\)", lambda match: PALETTE[match[1]][0], text)
