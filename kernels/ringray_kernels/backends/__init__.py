"""Backends: implementations of attention on one rank, by name. Imports no torch.

To add one: write ``backends/NAME.py`` (or a package) with the members of ``api.Backend``, as in
``reference.py``, and add its module path to ``BACKENDS`` (``MODULE:OBJECT`` where a module has
several) and its kind of blocks to ``BLOCKS``. The contract suite in ``tests/contracts`` runs every
registered backend against the fp64 oracle.
"""

from __future__ import annotations

from typing import Literal

BACKENDS: dict[str, str] = {
    "triton": "ringray_kernels.backends.triton",
    "aten": "ringray_kernels.backends.aten",
    "cudnn": "ringray_kernels.backends.cudnn",
    "flash": "ringray_kernels.backends.flash:installed",
    "flash4": "ringray_kernels.backends.flash:version_4",
    "flash-hub": "ringray_kernels.backends.flash:prebuilt",
    "reference": "ringray_kernels.backends.reference",
}

# Blocks that a backend takes, besides None: the tiles of its kernels (a text in specs), query rows
# per call, or none (which it accepts as rows and does not use).
BLOCKS: dict[str, Literal["tiles", "rows", "none"]] = {
    "triton": "tiles",
    "aten": "rows",
    "cudnn": "rows",
    "flash": "rows",
    "flash4": "rows",
    "flash-hub": "rows",
    "reference": "none",
}
INTERPRETED = ("triton",)  # backends that run in an interpreter on a CPU
GPU_ONLY = ("cudnn", "flash", "flash4", "flash-hub")
DOWNLOADED = ("flash-hub",)  # at their first use, so that nothing but their name may ask for them

# The order in which ``auto`` tries them. A CPU runs Triton in an interpreter, for tests only. No
# vendor's kernels are here: which of them is fastest differs from GPU to GPU (cuDNN is on Hopper
# only, github.com/huggingface/transformers/pull/48163), so ``auto`` takes them where they were
# measured to be, on that GPU.
PREFERRED: dict[str, tuple[str, ...]] = {
    "cuda": ("triton", "aten", "reference"),
    "cpu": ("aten", "reference"),
}


def on_device(backend: str, device: str) -> str:
    """Returns the name of a backend; ``auto`` is the first choice of ``device`` (cpu, cuda)."""
    return PREFERRED[device][0] if backend == "auto" else backend
