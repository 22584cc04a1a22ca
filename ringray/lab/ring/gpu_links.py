"""Links between the GPUs of one node, as NVML knows them."""

from __future__ import annotations

from contextlib import suppress

NVLINK = 100  # more than any path over PCI; NVML's levels go from 0 (one board) to 50 (two sockets)


def of(uuid: str) -> dict[str, int]:
    """Returns the closeness of a node's other GPUs to this one by UUID; empty without NVML."""
    closeness: dict[str, int] = {}
    with suppress(Exception):  # no NVML, or an error of one of many drivers
        import pynvml

        pynvml.nvmlInit()
        own = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        others = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        by_uuid = {pynvml.nvmlDeviceGetUUID(gpu): gpu for gpu in others}
        for name in by_uuid.keys() - {uuid}:
            with suppress(pynvml.NVMLError):  # of this pair
                pair = own, by_uuid[name]
                linked = pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
                near = NVLINK * (linked == pynvml.NVML_P2P_STATUS_OK)
                closeness[name] = near - int(pynvml.nvmlDeviceGetTopologyCommonAncestor(*pair))
    return closeness
