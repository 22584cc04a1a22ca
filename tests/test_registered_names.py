"""A registered name stands in no list outside its registry's folder, read from the sources.

The folder states the facts about a name (``ringray.transport``: how the tuner tries it), so a new
one needs no change elsewhere. Docstrings, and names within longer texts, are not looked at.
"""

from __future__ import annotations

import ast
import re

import pytest

from ringray.lab.kinds import KINDS
from ringray.lab.kinds.baselines import BASELINES
from ringray.lab.search import METHODS
from ringray.partition import PARTITIONS
from ringray.transport import TRANSPORTS
from ringray_kernels.backends import BACKENDS
from tests.test_architecture import modules

REGISTRIES = {
    "ringray.partition": PARTITIONS,
    "ringray.transport": TRANSPORTS,
    "ringray_kernels.backends": BACKENDS,
    "ringray.lab.kinds": KINDS,
    "ringray.lab.kinds.baselines": BASELINES,
    "ringray.lab.search": METHODS,
}

SECTION = "the section of a spec, or its short heading"
PACKAGE = "the package, for its version"
BENCH = "fixed points of the kernels' benchmark; the kernels import nothing of ringray"
CONTENDER = "a contender of the kernels' benchmark, on one GPU"

# Module and text -> the reason why it stands there.
ALLOWED = {
    ("ringray.base.provenance", "triton"): PACKAGE,
    ("ringray.lab.cli.doctor", "triton"): PACKAGE,
    ("ringray.tuning.table", "triton"): PACKAGE,
    ("ringray_kernels.bench.machine", "triton"): PACKAGE,
    ("ringray_kernels.bench.machine", "cudnn"): PACKAGE,
    ("ringray_kernels.bench.measure", "cudnn"): PACKAGE,
    ("ringray_kernels.bench.measure", "triton"): PACKAGE,
    ("ringray.lab.driver.resume", "ring"): SECTION,
    ("ringray.lab.driver.studies", "ring"): SECTION,
    ("ringray.lab.driver.trials", "ring"): SECTION,
    ("ringray.lab.plan.expand", "ring"): SECTION,
    ("ringray.lab.plan.forecast", "ring"): SECTION,
    ("ringray.lab.plan.limits", "ring"): SECTION,
    ("ringray.lab.plan.pruning", "ring"): SECTION,
    ("ringray.lab.predict.fitting", "ring"): "the field of a record: how the ring lay on nodes",
    ("ringray.lab.report.live", "ring"): SECTION,
    ("ringray.lab.report.words", "ring"): SECTION,
    ("ringray.lab.trial.config", "ring"): SECTION,
    ("ringray.models.huggingface.batch", "ring"): "the argument of a model's forward",
    ("ringray.models.huggingface.cache", "ring"): "the argument of a model's forward",
    ("ringray.models.huggingface.forward", "ring"): "the argument of a model's forward",
    ("ringray.models.huggingface.generation", "ring"): "the argument of a model's forward",
    ("ringray.verification.adapters.torch_context_parallel", "allgather"): "PyTorch's name",
    ("ringray.verification.defaults", "ring"): "the argument of a model's forward",
    ("ringray.verification.process", "reference"): "the function of a target",
    ("ringray.verification.target", "reference"): "the function of a target",
    ("ringray.verification.target", "ring"): "an adapter",
    ("ringray.lab.specs.sections", "grid"): "the default of specs",
    ("ringray.lab.trial.metrics", "overlap"): "a group of metrics",
    **{("ringray_kernels.bench.problems", name): BENCH for name in PARTITIONS},
    ("ringray_kernels.bench.contenders", "flex"): CONTENDER,
}


def texts(name: str) -> set[str]:
    """Returns all string constants of a module except docstrings and parts of f-strings."""
    tree = ast.parse(modules()[name].read_text())
    parts = {
        id(part)
        for node in ast.walk(tree)
        for part in (
            node.values if isinstance(node, ast.JoinedStr)
            else [node.value] if isinstance(node, ast.Expr)
            else []
        )
    }  # fmt: skip
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
    }


def found() -> set[tuple[str, str]]:
    """Module and text of each registered name, with or without a number, outside its folder."""
    named = set()
    for module in modules():
        for text in texts(module):
            name = re.sub(r":\d+$", "", text)
            for folder, registry in REGISTRIES.items():
                inside = module == folder or module.startswith(f"{folder}.")
                if name in registry and not inside:
                    named.add((module, text))
    return named


def test_registered_names_stand_in_their_folder() -> None:
    assert sorted(found() - ALLOWED.keys()) == []


@pytest.mark.parametrize(("module", "text"), ALLOWED)
def test_what_is_allowed_is_there(module: str, text: str) -> None:
    assert module in modules()
    assert text in texts(module), f"{ALLOWED[module, text]}: no longer needed"
