"""Ray's private API is used in one file."""

from __future__ import annotations

import re

from tests.test_architecture import ROOT, imports, modules

PRIVATE = re.compile(r"ray\.(.+\.)?_\w+(\..*)?|ray\.core\.generated(\..*)?")
# Its only class is a subclass of a private one, which Ray's autoscaler loads by its path.
SUBCLASS = "local_nodes.py"


def test_other_modules_import_no_private_module_of_ray() -> None:
    private = {name for name in modules() if any(map(PRIVATE.fullmatch, imports(name)))}
    assert private == {"ringray.lab.cluster.ray_private"}


def test_scripts_for_clusters_import_no_private_module_of_ray() -> None:
    for path in ROOT.glob("cluster/*.py"):
        lines = re.findall(r"^\s*(?:import|from) (\S+)", path.read_text(), re.M)
        private = [name for name in lines if PRIVATE.fullmatch(name)]
        assert not private or path.name == SUBCLASS, path
