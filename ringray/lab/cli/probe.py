"""The test of torch, in a process of its own that ``doctor`` starts.

``python -m ringray.lab.cli.probe`` prints one JSON object as its last line. A broken torch ends the
process, which ``doctor`` reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def torch_() -> dict[str, Any]:
    """Reports GPUs, whether gloo forms a group, usable backends and the one of auto."""
    import torch
    import torch.distributed as dist

    from ringray_kernels import api
    from ringray_kernels.backends import BACKENDS

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report: dict[str, Any] = {"gpus": devices, "backends": {}}
    try:
        with tempfile.TemporaryDirectory() as folder:
            place = (Path(folder) / "store").as_uri()
            dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
            ones = torch.ones(1)
            dist.all_reduce(ones)
            dist.destroy_process_group()
        report["gloo"] = None if ones.item() == 1 else "a sum over one rank came out wrong"
    except Exception as error:  # of any type: the user must see it
        report["gloo"] = f"{type(error).__name__}: {error}"
    if not devices:  # as ranks on a CPU do, before triton is imported
        os.environ["TRITON_INTERPRET"] = "1"
    q = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16, device="cuda" if devices else "cpu")
    for name in BACKENDS:
        try:
            backend = api.load_backend(name)
            report["backends"][name] = backend.unsupported(q)
            if getattr(backend, "INTERPRETED", False):
                report["interpreted"] = True
        except Exception as error:
            report["backends"][name] = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # reported above for each backend
        report["auto"] = api.resolve_backend("auto", q)
    return report


if __name__ == "__main__":
    print(json.dumps(torch_()), flush=True)
