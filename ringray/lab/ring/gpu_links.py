"""Links between the GPUs of one node, as NVML knows them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

NVLINK = 100  # more than any path over PCI; NVML's levels go from 0 (one board) to 50 (two sockets)


def of(uuid: str) -> dict[str, int]:
    """Returns the closeness of a node's other GPUs to this one by UUID; empty without NVML."""
    found: dict[str, int] = {}
    with suppress(Exception):  # no NVML, or an error of one of many drivers
        import pynvml

        pynvml.nvmlInit()
        own = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        others = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        by_uuid = {_text(pynvml.nvmlDeviceGetUUID(one)): one for one in others}
        for name in by_uuid.keys() - {uuid}:
            with suppress(pynvml.NVMLError):  # of this pair
                found[name] = _near(pynvml, own, by_uuid[name])
    return found


def _near(nvml: Any, own: Any, other: Any) -> int:
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(own, other)
    linked = nvml.nvmlDeviceGetP2PStatus(own, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return NVLINK * (linked == nvml.NVML_P2P_STATUS_OK) - int(level)


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid
