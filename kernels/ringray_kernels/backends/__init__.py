"""Backends: what computes attention on one rank. Names without importing torch.

To add one: write ``backends/NAME.py`` (or a package) with ``forward``, ``backward`` and
``unsupported`` as in ``reference.py``, and add its module path to ``BACKENDS``. The contract suite
in ``tests/contracts`` runs every registered backend against the fp64 oracle.
"""

BACKENDS: dict[str, str] = {
    "aten": "ringray_kernels.backends.aten",
    "reference": "ringray_kernels.backends.reference",
}
