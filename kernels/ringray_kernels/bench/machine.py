"""The measured machine: names and versions for the record, cache, memory, peak rates."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ringray_kernels.bench.source import PACKAGE, source_digest
from ringray_kernels.dtypes import DTYPES

# Dense 16-bit matrix peak in TFLOP/s, from the vendors' data sheets, by a part of the device's
# name; the first that matches counts.
PEAKS: tuple[tuple[str, float], ...] = (
    ("H200", 989.0),
    ("H100 80GB HBM3", 989.0),
    ("H100 SXM", 989.0),
    ("A100", 312.0),
    ("B200", 2250.0),
    ("MI300X", 1307.0),
)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Returns the peak rate of the device in ``dtype``, TFLOP/s; None for an unknown device.

    fp32 products run as tf32 at best, at half the rate of 16 bits.
    """
    for part, peak in PEAKS:
        if part in device_name:
            return peak * 2 / DTYPES[dtype].itemsize
    return None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def cache_bytes(device: torch.device) -> int:
    """Returns the size of a GPU's last-level cache; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0)) or 64 << 20


def memory_bytes(device: torch.device) -> int:
    """Returns the free memory of a GPU; 1 GiB for a CPU."""
    if device.type != "cuda":
        return 1 << 30
    return int(torch.cuda.mem_get_info(device)[0])


def _ask(command: list[str], cwd: Path | None = None) -> str | None:
    """Returns the first line that a command prints, or None."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def _smi(device: torch.device, *fields: str) -> list[str] | None:
    """Returns fields of nvidia-smi for torch's ``device``, or None."""
    if device.type != "cuda" or torch.version.hip:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = f"GPU-{uuid}" if uuid is not None else str(device.index or 0)
    line = _ask(
        ["nvidia-smi", f"--id={which}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    )
    return None if line is None else [value.strip() for value in line.split(",")]


def clocks(device: torch.device) -> dict[str, str] | None:
    """Returns current clock, temperature and power, or None without nvidia-smi."""
    names = ("clocks.sm", "temperature.gpu", "power.draw")
    values = _smi(device, *names)
    return None if values is None else dict(zip(names, values, strict=False))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """Returns the hardware and versions of a measurement as JSON-able values."""
    smi = _smi(device, "driver_version", "clocks.max.sm", "power.limit") or [""] * 3
    # The variable names the commit of a copy without .git.
    commit = os.environ.get("RINGRAY_COMMIT") or _ask(["git", "rev-parse", "HEAD"], cwd=PACKAGE)
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "triton": _version("triton"),
        "flash_attn": _version("flash-attn"),
        "driver": smi[0] or None,
        "max_sm_clock": smi[1] or None,
        "power_limit": smi[2] or None,
        "commit": commit,
        "source": source_digest(),
    }
