"""Links, make targets and package data, which a newcomer relies on before any code runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_is_broken(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if re.match(r"(https?|mailto):", link):
            continue
        target, _, anchor = link.partition("#")
        assert not target or (page.parent / target).exists(), f"{page.name}: {link}"
        whole = (page.parent / target) if target else page
        assert not anchor or anchor in anchors(whole), f"{page.name}: {link}"


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z]+):", text, flags=re.MULTILINE))


def test_ci_runs_every_check() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = script.read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in commands
    assert [c for c in commands if c.startswith("make ")] == [
        "make lint",
        "make test",
        "make QUICK=1 mutants",
        "make chaos",
        "make oldest",
    ]


def test_the_main_objects_of_the_design_exist() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition("## Main objects")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| `(.*?)` \|", section, flags=re.MULTILINE)
    assert len(rows) > 20
    for names, place in rows:
        top = ROOT / "kernels" if place.startswith("ringray_kernels") else ROOT / "ringray"
        path = top / place
        files = [path] if path.suffix else sorted(path.rglob("*.py"))
        source = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class {name}\b|{name}\b.* = )", source, re.MULTILINE), (
                place,
                name,
            )
