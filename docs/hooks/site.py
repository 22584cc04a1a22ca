"""The pages of the site and their order: a hook of MkDocs.

Files have the same places on the site as in the repository, so links that work in one work in the
other: README.md is the first page, docs/advise.md is docs/advise.html, and a link to a source or to
a spec leads to a copy of it. A page that nobody ordered comes last, under "More".

pictures   partitions, intervals and walks as SVG, from the tables that the ring executes
choosing   tables of predictions
families   tables of models
reference  specs, command line, API
results    measured results
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
# Predicts from the tables of the repository, whatever was measured on this machine.
os.environ["RINGRAY_HOME"] = str(ROOT / "site" / "no-home")

import choosing  # noqa: E402
import families  # noqa: E402
import pictures  # noqa: E402
import reference  # noqa: E402
import results  # noqa: E402

# Heading: titles and pages. A page that is not there is left out.
ORDER: dict[str, dict[str, str]] = {
    "": {"ringray": "README.md"},
    "Start": {
        "Ten minutes": "docs/ten-minutes.md",
        "Choosing a strategy": "docs/choosing.md",
        "Concepts": "docs/concepts.md",
        "Comparison with peers": "docs/peers.md",
    },
    "In your model": {
        "Modules and context managers": "docs/models.md",
        "Hugging Face": "docs/huggingface.md",
        "Plug-ins": "docs/plugins.md",
        "Accelerate and torchtitan": "docs/accelerate.md",
        "Coming from another library": "docs/coming-from.md",
        "Coming from a training framework": "docs/coming-from-training.md",
        "Packed documents": "docs/packed.md",
        "Training": "docs/training.md",
        "Verifying a model": "docs/verify.md",
        "RL and multi-token heads": "docs/rl.md",
        "Decoding": "docs/decoding.md",
        "Transports": "docs/transports.md",
    },
    "Measure": {
        "Advice": "docs/advise.md",
        "Models from their config": "docs/configs.md",
        "Prediction": "docs/prediction.md",
        "Hardware": "docs/hardware.md",
        "Published runs": "docs/published.md",
        "Reports": "docs/report.md",
        "Comparing two sweeps": "docs/compare.md",
        "Watching a sweep": "docs/watch.md",
        "From Python": "docs/python.md",
        "Autotuning": "docs/autotune.md",
        "Overlap": "docs/overlap.md",
        "MLflow": "docs/mlflow.md",
        "Metrics": "docs/metrics.md",
        "Records": "docs/records.md",
        "Results by hardware": "docs/reference/results.md",
        "The paper's tables": "experiments/paper/README.md",
    },
    "Clusters": {
        "Autoscaling clusters": "docs/cluster.md",
        "Jobs": "docs/jobs.md",
        "Faults": "docs/faults.md",
        "Security": "docs/security.md",
    },
    "Kernels": {
        "The Triton kernels": "docs/kernels.md",
        "The kernel benchmark": "docs/benchmarks.md",
    },
    "Reference": {
        "Specs": "docs/reference/specs.md",
        "Command line": "docs/reference/commands.md",
        "Python": "docs/reference/api.md",
    },
    "Contribute": {
        "How ringray works": "docs/design.md",
        "Features and their tests": "docs/features.md",
        "Contributing": "CONTRIBUTING.md",
        "Changes": "CHANGELOG.md",
    },
}
GENERATED: dict[str, Callable[[], str]] = {
    "docs/reference/specs.md": reference.specs,
    "docs/reference/commands.md": reference.commands,
    "docs/reference/api.md": reference.api,
    "docs/reference/results.md": results.page,
}
PARTS: dict[str, Callable[[], str]] = {**pictures.PARTS, **choosing.PARTS, **families.PARTS}
_PART = re.compile(r"^<!-- generated: (.*?) -->$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s#]+)")


def pages() -> list[str]:
    """Returns the pages that people wrote, in no order of importance."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "--", "*.md"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    tops = ("docs/", "experiments/")
    every = found.split() or [str(one.relative_to(ROOT)) for one in _without_git()]
    return sorted(page for page in every if "/" not in page or page.startswith(tops))


def _without_git() -> Iterator[Path]:
    for pattern in ("*.md", "docs/*.md", "experiments/*/*.md"):
        yield from ROOT.glob(pattern)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the navigation to the pages that there are."""
    there = [*pages(), *GENERATED]
    nav: list[Any] = []
    for heading, titles in ORDER.items():
        known = [{title: page} for title, page in titles.items() if page in there]
        nav += [{heading: known}] if heading and known else known
    ordered = {page for titles in ORDER.values() for page in titles.values()}
    if rest := [page for page in there if page not in ordered]:
        nav.append({"More": rest})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds all pages, and the files that they link to."""
    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    linked: set[Path] = set()
    for name in pages():
        page = ROOT / name
        files.append(_file(page, config))
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            linked.add(Path(os.path.normpath(page.parent / link)))
    for path in sorted(linked):
        if path.is_file() and ROOT in path.parents and not files.get_file_from_path(_name(path)):
            files.append(_file(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Fills in what is generated."""
    del page

    def part(match: re.Match[str]) -> str:
        if match[1] not in PARTS:
            raise PluginError(f"nothing is generated as {match[1]!r}; there are {', '.join(PARTS)}")
        return PARTS[match[1]]()

    return _PART.sub(part, markdown)


def _file(path: Path, config: MkDocsConfig) -> File:
    included = InclusionLevel.INCLUDED  # .rayignore, too
    return File(
        _name(path), str(ROOT), config.site_dir, config.use_directory_urls, inclusion=included
    )


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
