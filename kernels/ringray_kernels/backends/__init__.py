"""Backends: implementations of attention on one rank, by name. Imports no torch.

To add one: write ``backends/NAME.py`` (or a package) with the members of ``api.Backend``, as in
``reference.py``, and add its module path to ``BACKENDS`` and its kind of blocks to ``BLOCKS``. The
contract suite in ``tests/contracts`` runs every registered backend against the fp64 oracle.
"""

from __future__ import annotations

from typing import Literal

BACKENDS: dict[str, str] = {
    "triton": "ringray_kernels.backends.triton",
    "aten": "ringray_kernels.backends.aten",
    "cudnn": "ringray_kernels.backends.cudnn",
    "flash": "ringray_kernels.backends.flash",
    "reference": "ringray_kernels.backends.reference",
}

# Blocks that a backend takes, besides None: the tiles of its kernels (a text in specs), query rows
# per call, or none (which it accepts as rows and does not use).
BLOCKS: dict[str, Literal["tiles", "rows", "none"]] = {
    "triton": "tiles",
    "aten": "rows",
    "cudnn": "rows",
    "flash": "rows",
    "reference": "none",
}
INTERPRETED = ("triton",)  # backends that run in an interpreter on a CPU
GPU_ONLY = ("cudnn", "flash")

# The order in which ``auto`` tries them. A CPU runs Triton in an interpreter, for tests only.
PREFERRED: dict[str, tuple[str, ...]] = {
    "cuda": ("triton", "aten", "reference"),
    "cpu": ("aten", "reference"),
}


def on_device(backend: str, device: str) -> str:
    """Returns the name of a backend; ``auto`` is the first choice of ``device`` (cpu, cuda)."""
    return PREFERRED[device][0] if backend == "auto" else backend
