"""One rank: a Ray actor that owns one device, joins rings and runs trials.

torch is imported when the actor starts, never in the driver, which only needs this class's name.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringray.base.provenance import code_digest
from ringray.instruments import progress
from ringray.instruments.progress import HERE
from ringray.lab.kinds import KINDS
from ringray.lab.ring.memory_limit import MemoryLimit
from ringray.lab.trial import faults
from ringray.lab.trial.faults import Fault
from ringray.lab.trial.machine_load import Watch
from ringray.tuning import table as tuned

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringray.instruments.progress import Progress
    from ringray.lab.trial.config import TrialConfig
    from ringray.lab.trial.measurement import RankReport
    from ringray.tuning.table import Place


@dataclass(frozen=True)
class Introduction:
    """What a rank tells of itself when it starts. ``device`` is ``cpu`` or a GPU's name;
    ``place``: where tuned choices hold for it; ``log``: the path of what it writes to stderr."""

    pid: int
    address: str
    code: str
    device: str
    memory_bytes: int
    place: Place
    log: str


class Rank:
    """The actor. Its methods are called on all ranks of a ring at the same time, but for those that
    answer from a thread beside the one that works.

    ``memory``: bytes that it may use beyond what it has when its first trial begins, or None.
    """

    def __init__(self, device: str, memory: int | None = None) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler reports its own start
        os.environ["RINGRAY_TUNED"] = "0"  # the driver chooses for all ranks
        if device == "cpu":
            # Triton decides when it is imported, and a CPU has no other way to run its kernels.
            os.environ["TRITON_INTERPRET"] = "1"
        import torch

        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._group: dist.ProcessGroup | None = None
        self._side: dist.ProcessGroup | None = None
        self._rank, self._memory = 0, memory
        self._store: Any = None
        self._gpu: str | None = None
        self._ration = MemoryLimit(memory if device == "cpu" else None)
        if device == "cuda":
            torch.cuda.set_device(self._device)
            properties = torch.cuda.get_device_properties(self._device)
            self._gpu = f"GPU-{properties.uuid}"
            if memory is not None:
                share = min(1.0, memory / properties.total_memory)
                torch.cuda.set_per_process_memory_fraction(share, self._device)

    def introduce(self) -> Introduction:
        """Who this rank is; the driver refuses ranks that run other code than it does."""
        import psutil
        import torch

        name, memory = "cpu", psutil.virtual_memory().total
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            name, memory = properties.name, properties.total_memory
        return Introduction(
            os.getpid(), _address(), code_digest(), name, memory, tuned.here(name), _log()
        )

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
        self._group = self._side = dist.group.WORLD
        self._rank = rank
        if backend == "nccl":  # what ranks must agree on when their devices are full
            self._side = dist.new_group(backend="gloo", timeout=patience)

    def leave(self) -> None:
        """Leave the ring, if in one."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._group = self._side = None
        self._rank = 0

    def progress(self) -> Progress:
        """How far this rank is; answered while it works."""
        return HERE.now()

    def stacks(self) -> tuple[Progress, str]:
        """That, and what its threads are at; answered while it works."""
        return HERE.now(), progress.stacks()

    def log(self, path: str) -> str:
        """The end of another rank's log on this node; answered while this one works."""
        return progress.tail_of(path)

    def run(self, kind: str, flat: dict[str, Any]) -> RankReport | Fault:
        """Runs one trial of ``kind``; ``flat`` is ``TrialConfig.as_dict()``.

        Returns failures as plain data: exceptions of a compiler or a device may not unpickle.
        """
        HERE.begin()
        try:
            self._ration.impose()
            return self._measure(kind, flat)
        except Exception as error:
            fault = self._fault(error)
            self._ration.lift()
        # Here the exception is forgotten, and with it the frames that held the trial's tensors.
        gc.collect()
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        return fault

    def _fault(self, error: Exception) -> Fault:
        """With what was free, as long as everything is still held."""
        import torch

        free: int | None = None
        if faults.out_of_memory(error):
            if self._device.type == "cuda":
                free = torch.cuda.mem_get_info(self._device)[0]
                if self._memory is not None:
                    free = min(free, self._memory - torch.cuda.memory_reserved(self._device))
            else:
                free = self._ration.left()
            if free is None:
                import psutil

                free = psutil.virtual_memory().available
        found = replace(faults.of_exception(error, self._rank), hop=str(HERE))
        return found if free is None else replace(found, free_bytes=free, limit_bytes=self._memory)

    def _measure(self, kind: str, flat: dict[str, Any]) -> RankReport:
        import torch
        import torch.distributed as dist

        from ringray.lab.kinds.base import RankContext
        from ringray.lab.trial.config import TrialConfig

        config: TrialConfig = TrialConfig.from_dict(flat)
        torch.set_num_threads(config.threads)
        context = RankContext(
            rank=dist.get_rank() if self._group else 0,
            world_size=dist.get_world_size() if self._group else 1,
            device=self._device,
            group=self._group,
            side=self._side,
        )
        measure = importlib.import_module(KINDS[kind].module).run
        watch = Watch(self._gpu)
        report: RankReport = measure(config, context)
        report.values |= {name: [value] for name, value in watch.stop().items()}
        HERE.end()
        return report


def _log() -> str:
    """Where Ray has led this process's stderr to; empty where that is no file."""
    with contextlib.suppress(OSError):
        path = str(Path("/proc/self/fd/2").readlink())
        return path if path.endswith(".err") else ""
    return ""


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
