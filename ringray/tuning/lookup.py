"""The meaning of ``auto`` and of no blocks: the tuned choice if one holds, else the default."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ringray.base.errors import UserError
from ringray.traffic.mask import Mask
from ringray.tuning import table as tuned
from ringray.tuning.table import Buckets, Place
from ringray_kernels.backends import on_device
from ringray_kernels.config import Blocks

logger = logging.getLogger("ringray")

Cut = Blocks | int | str | None


@dataclass(frozen=True)
class Strategy:
    """The way in which a ring computes: names as in ``ringray.ring_attention``."""

    #: In a call of the op also what ``ringray.deal`` returns.
    partition: str = tuned.DEFAULTS["partition"]
    transport: str = tuned.DEFAULTS["transport"]
    backward: str = "auto"
    backend: str = "auto"

    #: A table of tuned choices and a spec have ``Blocks`` as their text.
    blocks: Cut = None

    #: The origin of the strategy, and that of backend and blocks, in words.
    source: str = ""


def strategy(
    wanted: Buckets,
    place: Place,
    *,
    partition: str = "auto",
    transport: str = "auto",
    backward: str = "auto",
    backend: str,
    backend_open: bool = False,
    blocks: int | str | None = None,
) -> Strategy:
    """Replaces ``auto`` and None; keeps given values.

    A tuned strategy is used only if it agrees with the given values. ``backend`` is the one that
    will compute, unless ``backend_open`` and another one was measured to be faster; blocks tuned
    for another one are not used. The backward walk is chosen together with the transport.
    """
    asked = {"partition": partition, "transport": transport, "backward": backward}
    named = {name: value for name, value in asked.items() if value != "auto"}
    chosen: dict[str, Any] = {}
    sources = []
    cut = {"backend": backend, "blocks": blocks}
    try:
        if off():
            raise UserError("RINGRAY_TUNED=0")
        table = tuned.table()
    except UserError as error:
        return _settled(named, chosen, cut, [f"default: {error}"])
    if "auto" in (partition, transport):
        entry, why = table.find("strategy", wanted.strategy, place)
        choice = entry.choice if entry else named
        # A choice was measured as a whole: it does not hold beside another partition or transport.
        clash = [f"{name}={choice.get(name)}" for name in named if choice.get(name) != named[name]]
        if clash:
            entry, why = None, f"tuned with {', '.join(clash)}"
        chosen = dict(entry.choice) if entry else {}
        sources.append(f"strategy: {why if entry else f'default ({why})'}")
    if transport != "auto":  # whoever names a transport names its backward walk, or takes auto
        chosen.pop("backward", None)
    if blocks is not None:
        return _settled(named, chosen, cut, sources)
    # Blocks that were measured in the whole ring win over those of a kernel alone.
    tuned_cut = _cut(chosen, backend, backend_open)
    if tuned_cut is None:
        entry, why = table.find("kernel", wanted.kernel, place)
        tuned_cut = _cut(entry.choice, backend, backend_open) if entry else None
        sources.append(f"backend and blocks: {why if tuned_cut else f'default ({why})'}")
    return _settled(named, chosen, tuned_cut or cut, sources)


def _cut(choice: dict[str, Any], backend: str, backend_open: bool) -> dict[str, Any] | None:
    """Returns backend and blocks of a choice, None where they are the default or not usable:
    another backend is, if ``backend`` was measured beside it."""
    own, blocks = choice.get("backend"), choice.get("blocks")
    compared = backend_open and backend in choice.get("compared", ())
    if own is None or (own, blocks) == (backend, None) or not (own == backend or compared):
        return None
    return {"backend": own, "blocks": blocks}


def _settled(
    named: dict[str, str], chosen: dict[str, Any], cut: dict[str, Any], sources: list[str]
) -> Strategy:
    names = {**tuned.DEFAULTS, "backward": "auto", **named}
    names |= {name: chosen[name] for name in names if name in chosen}
    return Strategy(**names, **cut, source="; ".join(sources))


def off() -> bool:
    """Returns whether ``RINGRAY_TUNED=0`` turns lookups off, as it does in the ranks of a driver,
    which chooses for all of them."""
    return os.environ.get("RINGRAY_TUNED") == "0"


@lru_cache(maxsize=1)
def anything_tuned() -> bool:
    """Returns whether any tuned choice exists; reads the folder once per process."""
    if off():
        return False
    try:
        return bool(tuned.table().entries)
    except UserError as error:
        logger.warning("no tuned choices: %s", error)
        return False


@lru_cache(maxsize=1024)
def for_process(
    wanted: Buckets,
    device: str,
    partition: str,
    transport: str,
    backward: str,
    backend: str,
    backend_open: bool,
) -> Strategy:
    """Returns ``strategy`` for calls of the op on ``device`` (a GPU's name, or cpu).

    Looks each problem up and logs it once, so that ranks agree although a table changes.
    """
    chosen = strategy(
        wanted,
        tuned.here(device),
        partition=partition,
        transport=transport,
        backward=backward,
        backend=backend,
        backend_open=backend_open,
    )
    logger.info("ring_attention: %s", chosen)
    return chosen


def tuned_strategy(
    *,
    ring_size: int,
    seq_len: int,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    documents: bool = False,
    backward: bool = True,
    device: str = "cpu",
    threads: int = 1,
    **mask: Any,
) -> Strategy:
    """Returns the choices of ``partition="auto"``, ``transport="auto"``, ``backend="auto"`` and
    ``blocks=None``.

    Args:
        seq_len: tokens of the whole sequence.
        dtype: as in a spec: bfloat16, float16 or float32.
        documents: whether several are packed into the sequence.
        backward: whether gradients are computed.
        device: a GPU's name in torch, or cpu.
        threads: per rank, on CPUs.
        mask: ``causal``, ``window`` and the other arguments of ``ring_attention`` that mask.
    """
    gpu = device != "cpu"
    wanted = tuned.buckets(
        Mask(seq_len=seq_len, documents=(0, seq_len) if documents else None, **mask),
        ring_size=ring_size,
        threads=0 if gpu else threads,
        dtype=dtype,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim,
        backward=backward,
    )
    backend = on_device("auto", "cuda" if gpu else "cpu")
    return for_process(wanted, device, "auto", "auto", "auto", backend, True)
