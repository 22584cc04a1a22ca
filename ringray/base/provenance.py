"""The origin of a measurement: hardware, versions, source code. No torch, no ray.

:func:`describe` is stored with each sweep. :func:`point_digest` names a measured point: the same
configuration on other hardware, with other code or another torch is another point.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ringray.base import cgroups, source_digest
from ringray.base.units import GIB

PROVENANCE = "ringray-source.json"  # the state of the repository, beside source sent without it
_PACKAGE = Path(__file__).resolve().parents[1]
_VERSIONED = ("torch", "triton", "ray", "mlflow")
# Packages that can change a measured number. Ray and MLflow only carry the numbers, so upgrading
# them must not make all points of a finished sweep look unmeasured.
_MEASURED_VERSIONS = ("ringray", "torch", "triton")


def describe() -> dict[str, Any]:
    """Returns the environment of this process as JSON-able values.

    Keys: ``hardware`` (cpu, cores that this process may use, memory_bytes, gpus), ``os``,
    ``python``, ``versions`` (None for an absent package), ``git`` (commit and dirty, or None
    outside a checkout), ``code`` (:func:`code_digest`) and ``kernels`` (:func:`measured_digest`).
    The host name is left out on purpose: it identifies people, and measurements do not depend on
    it.
    """
    return {
        "hardware": hardware(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(),
        "git": git_state(),
        "code": code_digest(),
        "kernels": measured_digest(),
    }


def packages() -> tuple[Path, ...]:
    """Returns the folders from which ``ringray`` and ``ringray_kernels`` are imported."""
    kernels = find_spec("ringray_kernels")
    assert kernels is not None
    return (_PACKAGE, *map(Path, kernels.submodule_search_locations or ()))


def point_digest(config: dict[str, Any], environment: dict[str, Any]) -> str:
    """Returns sha256 (hex) of a trial's config and of the measured parts of ``environment``."""
    measured = {"config": config, **measured_parts(environment)}
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()


def measured_parts(environment: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts of ``environment`` that can change a measured number.

    Memory counts in whole GiB: the operating system's share of it changes from boot to boot.
    """
    machine = dict(environment.get("hardware") or {})
    machine["memory_gib"] = round((machine.pop("memory_bytes", 0) or 0) / GIB)
    installed = environment.get("versions") or {}
    return {
        "kernels": environment.get("kernels"),
        "hardware": machine,
        "versions": {name: installed.get(name) for name in _MEASURED_VERSIONS},
    }


def commit(environment: dict[str, Any] | None) -> str | None:
    """Writes the checkout of an environment: "1a2b3c4", "1a2b3c4 dirty"; None outside of one."""
    git = (environment or {}).get("git")
    return f"{git['commit'][:7]}{' dirty' if git['dirty'] else ''}" if git else None


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Returns :func:`ringray.base.source_digest.code_digest` of both packages."""
    return source_digest.code_digest(packages())


@lru_cache(maxsize=1)
def measured_digest() -> str:
    """Returns :func:`ringray.base.source_digest.measured_digest` of both packages."""
    return source_digest.measured_digest(packages())


@lru_cache(maxsize=1)
def hardware() -> dict[str, Any]:
    """Returns CPU model, usable cores, memory in bytes and the names of all GPUs."""
    return {
        # On ARM there is no model name; platform.processor() comes closest.
        "cpu": _of_cpu("model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "gpus": _gpu_names(),
    }


def memory_bytes() -> int:
    """Returns the physical memory of this machine, or the part that its control groups allow."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(physical, cgroups.memory()))


def versions() -> dict[str, str | None]:
    """Returns installed versions from package metadata, without importing the packages."""
    from importlib import metadata  # half of this module's import time

    installed: dict[str, str | None] = {}
    for name in _VERSIONED:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None
    installed["ringray"] = version()
    return installed


def version() -> str | None:
    """Returns ringray's own version. A checkout on PYTHONPATH has no metadata, or wrong ones."""
    return getattr(sys.modules.get("ringray"), "__version__", None)


def git_state() -> dict[str, Any] | None:
    """Returns ``{"commit": hex, "dirty": bool}`` of the checkout that ringray is in, or None.

    Only a repository whose root holds the package counts: a virtual environment inside another
    checkout must not report that checkout's commit. Source that came with a job has a note.
    """
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return _provenance(root)
    if not shutil.which("git"):
        return None
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"],
            cwd=root,
            env={**variables, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=2,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, dirty = done.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(dirty)}


def _provenance(root: Path) -> dict[str, Any] | None:
    """Returns the note of ``ringray submit`` beside the source that it sent, or None."""
    try:
        note = json.loads((root / PROVENANCE).read_text(encoding="utf-8"))
        return {"commit": str(note["commit"]), "dirty": bool(note["dirty"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def bf16_products() -> dict[str, bool]:
    """Returns how the cores multiply bf16: by ``tiles`` (Intel's AMX), and whether PyTorch
    ``packs`` the operands for it (AVX-512)."""
    flags = _of_cpu("flags").split()
    return {"tiles": "amx_bf16" in flags, "packs": "avx512bw" in flags}


def _of_cpu(field: str) -> str:
    """Returns a field of the first core as Linux describes it, "" where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((" ".join(value.split()) for name, _, value in fields if name.strip() == field), "")


def cores() -> int:
    """Returns how many cores this process may use, by its affinity and its control groups."""
    usable = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    return max(1, int(min(usable, cgroups.cores())))


def _gpu_names() -> list[str]:
    """Returns the names that NVIDIA's driver has for the GPUs; empty without a working driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no such package or library, or a driver that fails: torch has no GPU either
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
