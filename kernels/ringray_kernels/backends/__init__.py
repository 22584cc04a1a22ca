"""Backends: what computes attention on one rank. Names without importing torch.

To add one: write ``backends/NAME.py`` (or a package) with what ``api.Backend`` lists, as in
``reference.py``, and add its module path to ``BACKENDS``. The contract suite in ``tests/contracts``
runs every registered backend against the fp64 oracle.
"""

BACKENDS: dict[str, str] = {
    "triton": "ringray_kernels.backends.triton",
    "aten": "ringray_kernels.backends.aten",
    "reference": "ringray_kernels.backends.reference",
}

# In which order ``auto`` tries them. A CPU runs Triton in an interpreter, for tests only.
PREFERRED: dict[str, tuple[str, ...]] = {
    "cuda": ("triton", "aten", "reference"),
    "cpu": ("aten", "reference"),
}


def on_device(backend: str, device: str) -> str:
    """A backend's name; ``auto`` is the first that ``device`` (cpu, cuda) prefers."""
    return PREFERRED[device][0] if backend == "auto" else backend
