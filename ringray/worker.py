"""One rank: a Ray actor that owns one device, joins rings and runs trials.

torch is imported when the actor starts, never in the driver, which only needs this class's name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ringray import tuned
from ringray.environment import code_digest
from ringray.kinds import KINDS
from ringray.usage import Watch

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringray.measure import Report
    from ringray.plan import Config
    from ringray.tuned import Place


@dataclass(frozen=True)
class Introduction:
    """What a rank tells of itself when it starts. ``device`` is ``cpu`` or a GPU's name;
    ``place``: where tuned choices hold for it."""

    pid: int
    address: str
    code: str
    device: str
    memory_bytes: int
    place: Place


class Rank:
    """The actor. Its methods are called on all ranks of a ring at the same time."""

    def __init__(self, device: str, threads: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler reports its own start
        os.environ["RINGRAY_TUNED"] = "0"  # the driver chooses for all ranks
        if device == "cpu":
            # Triton decides when it is imported, and a CPU has no other way to run its kernels.
            os.environ["TRITON_INTERPRET"] = "1"
        import torch

        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._threads = threads
        self._group: dist.ProcessGroup | None = None
        self._store: Any = None
        torch.set_num_threads(threads)
        self._gpu: str | None = None
        if device == "cuda":
            torch.cuda.set_device(self._device)
            self._gpu = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"

    def introduce(self) -> Introduction:
        """Who this rank is; the driver refuses ranks that run other code than it does."""
        import psutil
        import torch

        name, memory = "cpu", psutil.virtual_memory().total
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            name, memory = properties.name, properties.total_memory
        return Introduction(os.getpid(), _address(), code_digest(), name, memory, tuned.here(name))

    def host_store(self, timeout: float) -> tuple[str, int]:
        """Rank 0: hold the store through which ranks find each other; its address and the port that
        it has bound. ``timeout`` in seconds."""
        import torch.distributed as dist

        host = _address()
        # It would listen on every interface, and asks nobody who they are.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
        port = int(listening.getsockname()[1])
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=timeout), master_listen_fd=listening.detach(),
        )  # fmt: skip
        return host, port

    def join(
        self, address: tuple[str, int], rank: int, world_size: int, generation: int, timeout: float
    ) -> None:
        """Form the process group of one ring; an operation that takes longer than ``timeout``
        (seconds) fails."""
        import torch.distributed as dist

        self.leave()
        patience = timedelta(seconds=timeout)
        if self._store is None:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                *address, is_master=False, timeout=patience
            )
        _choose_interface()
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        options = None
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = True  # transfers go before the kernels they hide in
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(  # type: ignore[attr-defined]
                f"generation-{generation}", self._store
            ),
            rank=rank,
            world_size=world_size,
            timeout=patience,
            device_id=self._device if backend == "nccl" else None,
            pg_options=options,
        )
        self._group = dist.group.WORLD

    def leave(self) -> None:
        """Leave the ring, if in one."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._group = None

    def run(self, kind: str, flat: dict[str, Any]) -> Report:
        """Run one trial of ``kind``; ``flat`` is ``Config.as_dict()``."""
        import torch.distributed as dist

        from ringray.kinds.base import RankContext
        from ringray.plan import Config

        config: Config = Config.from_dict(flat)
        context = RankContext(
            rank=dist.get_rank() if self._group else 0,
            world_size=dist.get_world_size() if self._group else 1,
            device=self._device,
            threads=self._threads,
            group=self._group,
        )
        measure = importlib.import_module(KINDS[kind]).run
        watch = Watch(self._gpu)
        report: Report = measure(config, context)
        report.usage = watch.stop()
        return report


def _address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _choose_interface() -> None:
    """Tell gloo the interface of this node's address: it would ask the host name, which may not
    resolve."""
    import psutil

    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = _address()
    with contextlib.suppress(OSError):
        for name, addresses in psutil.net_if_addrs().items():
            if any(a.family == socket.AF_INET and a.address == address for a in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return
