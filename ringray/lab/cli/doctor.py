"""``doctor``: reports what this machine or a cluster can run, and how to get missing parts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ringray.base import private_files, provenance, toolchain, units
from ringray.base.errors import RingrayError, UserError, reason_of
from ringray.base.redaction import shown
from ringray.lab.cli.options import ADDRESS, Option, Output, options
from ringray.lab.cluster.embedded import local_ranks
from ringray_kernels.backends import INTERPRETED

LEAST = {"torch": (2, 11), "triton": (3, 6)}
TRIED = {"torch": "2.13.0", "triton": "3.9.0", "ray": "2.60.0", "mlflow": "3.17.2"}
_QUICKSTART_MEMORY = 2 * units.GIB  # two ranks and Ray itself
_DISK = 1 * units.GIB


Verdict = Literal["ok", "missing", "note"]


@dataclass(frozen=True)
class MachineFact:
    """One line: ``ok``, ``missing`` (the quickstart cannot run without it) or ``note``."""

    verdict: Verdict
    what: str
    text: str


@options(
    ADDRESS,
    Option("--cluster", action="store_true", help="measure the links between a cluster's nodes"),
    Output("--json", metavar="F", help="beside --cluster: write all links to F; - is stdout"),
)
def doctor(arguments: argparse.Namespace) -> int:
    """Prints a line per finding; returns 0 if the quickstart can run, else 1. With ``--cluster``
    does as ``links``."""
    if arguments.cluster:
        from ringray.lab.cli.links import links

        return links(arguments)
    if arguments.json is not None:
        raise UserError(f"--json: got {arguments.json!r}, expected beside --cluster only")
    missing = 0
    for finding in _findings(arguments.address):
        print(shown(f"{finding.verdict:<8}{finding.what:<10}{finding.text}"), flush=True)
        missing += finding.verdict == "missing"
    if missing:
        print(f"\n{units.plural(missing, 'thing')} missing: the quickstart cannot run here yet")
        return 1
    print("\nthe quickstart can run: ringray run experiments/quickstart.yaml")
    return 0


def _findings(address: str | None) -> Iterator[MachineFact]:
    yield MachineFact("ok", "python", platform.python_version())  # another one runs no command
    torch = probe()
    gpus, hardware = torch.get("gpus", []), provenance.hardware()
    needed: Verdict = "missing" if gpus else "note"  # of what only kernels for GPUs need
    way_out = "pip install 'torch>=2.11' (without a GPU: torch==2.13.0)"
    if "error" in torch:
        yield MachineFact("missing", "torch", f"{torch['error']}; {way_out}")
    else:
        yield _package("torch", "missing", way_out)
    yield _package("triton", needed, "only GPU kernels need it: pip install 'triton>=3.6'")
    if lacks := toolchain.missing():
        yield MachineFact(needed, "compiler", f"{lacks}; Triton needs it on a GPU")
    else:
        yield MachineFact("ok", "compiler", "a C compiler and Python's headers")
    yield _package("ray", "missing", "pip install 'ray[default]' -c constraints.txt")
    yield _package("mlflow", "missing", "pip install mlflow -c constraints.txt")
    cores = units.plural(hardware["cores"], "usable core")
    yield MachineFact("ok", "cpu", f"{hardware['cpu']}, {cores}")
    yield _memory()
    if gpus:
        yield MachineFact("ok", "gpu", ", ".join(gpus))
    elif seen := ", ".join(hardware["gpus"]):
        yield MachineFact("note", "gpu", f"{seen}, but torch cannot use it: install torch for CUDA")
    else:
        yield MachineFact("note", "gpu", "none: rings run on the CPU, over gloo")
    if trouble := torch.get("gloo"):
        hint = "the host name must resolve: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        yield MachineFact("missing", "gloo", f"{trouble}; {hint}")
    elif "gloo" in torch:
        yield MachineFact("ok", "gloo", "a group forms over the loopback")
    yield from _backends(torch)
    yield _home()
    most = local_ranks()
    text = f"up to {units.plural(most, 'rank')} on the CPU"
    if most > hardware["cores"]:
        text += f", {hardware['cores']} of them without sharing a core"
    if gpus:
        text = f"up to {units.plural(len(gpus), 'rank')} on GPUs, {text}"
    yield MachineFact("ok" if most >= 2 else "missing", "rings", text)
    if address := address or os.environ.get("RAY_ADDRESS"):
        yield _cluster(address)


def probe() -> dict[str, Any]:
    """Returns the report of a process of its own, which a broken torch may end; or an ``error``."""
    # The same paths as in this process: a checkout is often not installed.
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "ignore", "-m", "ringray.lab.cli.doctor"]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"error": last[0]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def torch_report() -> dict[str, Any]:
    """Reports of torch: GPUs, whether gloo forms a group, usable backends and the one of auto."""
    import torch
    import torch.distributed as dist

    from ringray_kernels import api
    from ringray_kernels.backends import BACKENDS, DOWNLOADED

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
    for name in (name for name in BACKENDS if name not in DOWNLOADED):
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


def _package(name: str, needed: Verdict, way_out: str) -> MachineFact:
    version = provenance.versions()[name]
    if version is None:
        return MachineFact(needed, name, f"not installed; {way_out}")
    numbers = tuple(map(int, re.findall("[0-9]+", version)[:2]))
    if name in LEAST and numbers < LEAST[name]:
        least = ".".join(map(str, LEAST[name]))
        why = f"{version} is too old, expected {least} or newer; {way_out}"
        return MachineFact("missing", name, why)
    if version.partition("+")[0] != TRIED[name]:
        return MachineFact("note", name, f"{version}; tested with {TRIED[name]}")
    return MachineFact("ok", name, version)


def _memory() -> MachineFact:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{units.memory(memory.total)}, {units.memory(memory.available)} free"
    if memory.available >= _QUICKSTART_MEMORY:
        return MachineFact("ok", "memory", text)
    needs = f"the quickstart needs {units.memory(_QUICKSTART_MEMORY)}"
    return MachineFact("note", "memory", f"{text}; {needs}")


def _backends(torch: dict[str, Any]) -> Iterator[MachineFact]:
    backends = torch.get("backends", {})
    interpreted = INTERPRETED if torch.get("interpreted") else ()
    usable = [name for name, why in backends.items() if why is None and name not in interpreted]
    if backends:
        text = ", ".join(usable) or "none works here"
        chosen = f"; auto is {torch['auto']}" if "auto" in torch else ""
        yield MachineFact("ok" if usable else "missing", "backends", text + chosen)
    reason = "TRITON_INTERPRET is set" if torch.get("gpus") else "its kernels need a GPU"
    for name, why in backends.items():
        if why is not None:
            yield MachineFact("note", "backends", f"{name}: {why}")
        elif name in interpreted:
            text = f"{name}: only in its interpreter, for small sizes ({reason})"
            yield MachineFact("note", "backends", text)


def _home() -> MachineFact:
    try:
        path = private_files.create_home()
    except RingrayError as error:
        return MachineFact("missing", "home", str(error))
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
        others = path.stat().st_mode & 0o022
    except OSError as error:
        why = f"{path} is not writable: {reason_of(error)}; set RINGRAY_HOME"
        return MachineFact("missing", "home", why)
    free = shutil.disk_usage(path).free
    text = f"{path}, {units.memory(free)} free"
    if others:
        text += f"; other users may write there and replace its files: chmod go-w {path}"
    return MachineFact("ok" if free >= _DISK and not others else "note", "home", text)


def _cluster(address: str) -> MachineFact:
    from ringray.lab.cluster.connect import connect

    try:
        with connect(address) as cluster:
            return MachineFact("ok", "cluster", f"{address}: {cluster.present}")
    except RingrayError as error:
        return MachineFact("missing", "cluster", str(error))


if __name__ == "__main__":
    print(json.dumps(torch_report()), flush=True)
