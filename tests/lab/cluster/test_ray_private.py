"""Ray's private API is used in one file."""

from __future__ import annotations

import re

import pytest

from tests.test_architecture import ROOT, imports, modules

PRIVATE = re.compile(r"ray\.(.+\.)?_\w+(\..*)?|ray\.core\.generated(\..*)?")
# Its only class is a subclass of a private one, which Ray's autoscaler loads by its path.
SUBCLASS = "local_nodes.py"


@pytest.mark.parametrize("name", sorted(modules()))
def test_other_modules_import_no_private_module_of_ray(name: str) -> None:
    private = [one for one in imports(name) if PRIVATE.fullmatch(one)]
    assert bool(private) == (name == "ringray.lab.cluster.ray_private")


def test_scripts_for_clusters_import_no_private_module_of_ray() -> None:
    scripts = [path for path in ROOT.glob("cluster/*.py") if path.name != SUBCLASS]
    assert scripts
    for path in scripts:
        lines = re.findall(r"^\s*(?:import|from) (\S+)", path.read_text(), re.M)
        assert not [one for one in lines if PRIVATE.fullmatch(one)], path
