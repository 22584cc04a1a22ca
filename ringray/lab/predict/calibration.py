"""Calibrations: what ``ringray calibrate`` has measured, one file per machine, version and device.

Each holds one entry in the format of ``hardware.yaml``, for the hardware and the versions that it
names. Beside them lie the links of clusters that ``ringray doctor --cluster`` has measured. No
torch, no Ray.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ringray.base import private_files, provenance
from ringray.base.errors import UserError
from ringray.lab.predict.hardware import (
    LOCAL,
    Fleet,
    Hardware,
    entry,
    names,
    parse_fleet,
    read_entries,
)
from ringray.lab.predict.links import ClusterLinks

Device = Literal["cpu", "cuda"]

_DIGITS = 12  # of digests
_LINKS = "links"  # files of links between nodes


def folder() -> Path:
    """Returns ``$RINGRAY_HOME/hardware``, which may not exist."""
    return private_files.home() / "hardware"


def versions(device: Device) -> dict[str, str]:
    """Returns what a measurement on ``device`` depends on: hardware, versions, sources."""
    parts = _here()
    values = {"device": device, **parts["hardware"], **parts["versions"]}
    values["gpus"] = ", ".join(values["gpus"])
    return {name: str(x) for name, x in values.items()} | {"kernels": parts["kernels"][:_DIGITS]}


def _here() -> dict[str, Any]:
    """Returns what a measurement depends on, of this machine now."""
    whole = {"hardware": provenance.hardware(), "versions": provenance.versions()}
    return provenance.measured_parts(whole | {"kernels": provenance.measured_digest()})


def covering(on: Fleet) -> Callable[[Mapping[str, Any], str], bool]:
    """Returns a function that tells whether a measurement in an environment, on its device, holds
    for ``on``: made by this code and its versions, on this machine or on GPUs of that name."""
    here = cache(_here)  # slow: reads all sources
    by_name = on.name != LOCAL

    def covers(environment: Mapping[str, Any], device: str) -> bool:
        there = provenance.measured_parts(dict(environment))
        models = there["hardware"].get("gpus") or []
        if on.shares_cores == (device == "cuda" or (device == "auto" and bool(models))):
            return False
        if not by_name:
            return there == here()
        same = any(names(model, on.name) for model in models)
        return same and there == here() | {"hardware": there["hardware"]}

    return covers


def path(device: Device) -> Path:
    """Returns the file for this machine with its versions of now; it may not exist."""
    return folder() / f"{LOCAL}-{_digest(versions(device))}.json"


def _digest(identity: Any) -> str:
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def write(fields: Mapping[str, Any], device: Device) -> Path:
    """Writes the entry of this machine, whole or not at all, and returns its file; raises UserError
    if a field is wrong, and OSError if it cannot be written."""
    place, whole = path(device), {**fields, "versions": versions(device)}
    entry(whole, str(place))
    return _kept(place, json.dumps({LOCAL: whole}, indent=1))


def write_links(links: ClusterLinks) -> Path:
    """Writes the links of a cluster over its older ones, and returns their file; raises OSError if
    it cannot be written."""
    cluster = sorted([node.name, dict(node.environment)] for node in links.nodes)
    place = folder() / f"{_LINKS}-{_digest(cluster)}.json"
    return _kept(place, links.model_dump_json(indent=1))


def _kept(place: Path, text: str) -> Path:
    private_files.create_home()
    private_files.folder(place.parent)
    private_files.write(place, text + "\n")
    return place


def _linked(on: Fleet) -> Fleet:
    """Returns ``on`` with the links of the cluster that was measured last of those that have its
    nodes: as many or more, by ``covering``."""
    files = folder().glob(f"{_LINKS}-*.json") if on.nodes > 1 else ()
    for place in sorted(files, key=_modified, reverse=True):
        try:
            links = ClusterLinks.model_validate_json(place.read_bytes())
        except (OSError, ValidationError) as error:
            raise UserError(f"{place} holds no links that can be read; remove it") from error
        covers, device = covering(on), "cpu" if on.shares_cores else "cuda"
        there = [node.environment for node in links.nodes if node.lost is None]
        link = links.link(on.hardware)
        if link and on.nodes <= len(there) and all(covers(had, device) for had in there):
            linked = f"links between nodes measured {links.measured} on {len(there)} nodes"
            hardware = on.hardware.model_copy(update={"outer": link})
            return replace(on, hardware=hardware, linked=linked)
    return on


def find(device: Device = "cpu") -> tuple[Hardware | None, str]:
    """Returns the entry that holds here and its file, or None and the reason with a way out; raises
    UserError if a file there is no entry of hardware."""
    if folder().is_dir():
        place = path(device)
        if place.exists():
            return _only(place), str(place)
    others = sorted(folder().glob(f"{LOCAL}-*.json"), key=_modified)
    for other in reversed(others):
        then, now = _only(other).versions, versions(device)
        if then.get("device") == device:
            changed = (f"{n} {then.get(n)}, now {now[n]}" for n in now if then.get(n) != now[n])
            return None, f"measured with {'; '.join(changed)}; run `ringray calibrate` again"
    return None, f"{device} is not measured on this machine; run `ringray calibrate`"


def fleet(text: str) -> Fleet:
    """Returns ``hardware.parse_fleet(text)``, in which ``local`` is this machine as it was
    measured, with links between its nodes as they were; raises UserError also if it was not."""
    return _linked(parse_fleet(text, _local() if text.partition(":")[0] == LOCAL else None))


def _local() -> Hardware:
    devices: tuple[Device, ...] = ("cuda", "cpu") if provenance.hardware()["gpus"] else ("cpu",)
    tried = [find(device) for device in devices]
    for hardware, _ in tried:
        if hardware is not None:
            return hardware
    raise UserError(f"{LOCAL}: {tried[0][1]}")


def _only(place: Path) -> Hardware:
    return next(iter(read_entries(place).values()))


def _modified(place: Path) -> float:
    return place.stat().st_mtime
