"""A rank: a Ray actor that owns one device, joins rings and runs trials.

torch is imported when the actor starts. The driver needs only the name of the class.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringray.base import toolchain
from ringray.base.provenance import code_digest, memory_bytes
from ringray.instruments import progress
from ringray.instruments.progress import HERE
from ringray.lab.kinds import TrialKind
from ringray.lab.ring.order import gpu_links
from ringray.lab.trial import faults
from ringray.lab.trial.faults import Fault
from ringray.lab.trial.machine_load import Watch
from ringray.lab.trial.measurement import peak_memory
from ringray.tuning import table as tuned

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringray.instruments.progress import Progress
    from ringray.lab.trial.config import TrialConfig
    from ringray.lab.trial.measurement import RankReport
    from ringray.tuning.table import Place


@dataclass(frozen=True)
class RankInfo:
    """A rank's description of itself. ``code``: digest of its sources; ``place``: for which tuned
    choices hold; ``log``: path of its stderr; ``lacks``: what Triton needs there on a GPU, or None;
    ``gpu``: UUID; ``gpu_links``: closeness of the node's other GPUs by UUID.
    """

    address: str
    code: str
    place: Place
    log: str
    lacks: str | None = None
    gpu: str = ""
    gpu_links: Mapping[str, int] = field(default_factory=dict)


class Rank:
    """The actor. All ranks of a ring get the same call at the same time, except for questions,
    which a thread beside the working one answers.

    ``memory``: bytes above the usage at the start of the first trial, or None for no limit.
    """

    def __init__(self, device: str, memory: int | None = None) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler reports its own start
        os.environ["RINGRAY_TUNED"] = "0"  # the driver chooses for all ranks
        if device == "cpu":
            # Triton reads this on import, and cannot run its kernels on a CPU otherwise.
            os.environ["TRITON_INTERPRET"] = "1"
        import torch

        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._group: dist.ProcessGroup | None = None
        self._side: dist.ProcessGroup | None = None
        self._rank, self._memory = 0, memory
        self._store: Any = None
        self._gpu: str | None = None
        self._limit = MemoryLimit(memory if device == "cpu" else None)
        if device == "cpu" and memory is not None:
            # The profiler takes 80 MiB when it first starts, which are not the trial's.
            peak_memory(lambda: None, self._device)
        if device == "cuda":
            torch.cuda.set_device(self._device)
            properties = torch.cuda.get_device_properties(self._device)
            self._gpu = f"GPU-{properties.uuid}"
            if memory is not None:
                share = min(1.0, memory / properties.total_memory)
                torch.cuda.set_per_process_memory_fraction(share, self._device)

    def introduce(self) -> RankInfo:
        """Describes this rank; the driver refuses ranks that run different code."""
        import torch

        cuda = self._device.type == "cuda"
        hardware = torch.cuda.get_device_name(self._device) if cuda else "cpu"
        lacks, gpu = toolchain.missing() if cuda else None, self._gpu or ""
        place, near = tuned.here(hardware), gpu_links(gpu) if gpu else {}
        return RankInfo(_address(), code_digest(), place, _log(), lacks, gpu, near)

    def host_store(self, timeout: float) -> tuple[str, int]:
        """Starts on rank 0 the store through which ranks find each other; returns its address and
        port. ``timeout`` in seconds."""
        import torch.distributed as dist

        host = _address()
        # By default it would listen on every interface, without authentication.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
        port = int(listening.getsockname()[1])
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
        options |= {"timeout": timedelta(seconds=timeout), "master_listen_fd": listening.detach()}
        self._store = dist.TCPStore(host, port, **options)  # type: ignore[attr-defined]
        return host, port

    def join(
        self, address: tuple[str, int], rank: int, world_size: int, generation: int, timeout: float
    ) -> None:
        """Forms the process group of one ring; its operations fail after ``timeout`` seconds."""
        import torch.distributed as dist

        self.leave()
        patience = timedelta(seconds=timeout)
        if self._store is None:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                *address, is_master=False, timeout=patience
            )
        _choose_interface()
        nccl, options = self._device.type == "cuda", None
        if nccl:
            options = dist.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = True  # transfers go before the kernels they hide in
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=dist.PrefixStore(  # type: ignore[attr-defined]
                f"generation-{generation}", self._store
            ),
            rank=rank,
            world_size=world_size,
            timeout=patience,
            device_id=self._device if nccl else None,
            pg_options=options,
        )
        self._group = self._side = dist.group.WORLD
        self._rank = rank
        if nccl:  # ranks must be able to agree when their devices are full
            self._side = dist.new_group(backend="gloo", timeout=patience)

    def leave(self) -> None:
        """Leaves the ring, if in one."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._group = self._side = None
        self._rank = 0

    def progress(self) -> Progress:
        """Returns the progress of the running trial."""
        return HERE.now()

    def stacks(self) -> tuple[Progress, str]:
        """Returns the progress and the stacks of all other threads."""
        return HERE.now(), progress.stacks()

    def log(self, path: str) -> str:
        """Returns the end of another rank's log on this node."""
        return progress.tail_of(path)

    def run(self, kind: TrialKind, flat: dict[str, Any]) -> RankReport | Fault:
        """Runs one trial of ``kind``; ``flat`` is ``TrialConfig.as_dict()``.

        Returns failures as plain data: exceptions of a compiler or a device may not unpickle.
        """
        HERE.enter("")  # what the trial before has told is gone
        HERE.enter("inputs")
        try:
            self._limit.impose()
            return self._measure(kind, flat)
        except Exception as error:
            fault = self._fault(error)
            self._limit.lift()
        # The exception is gone here, and with it the frames that held the trial's tensors.
        gc.collect()
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        return fault

    def _fault(self, error: Exception) -> Fault:
        """Returns the fault; of memory with the free bytes while the trial's tensors still live."""
        fault = replace(faults.of_exception(error, self._rank), hop=str(HERE))
        if isinstance(error, faults.BudgetError):
            return replace(fault, limit_bytes=error.budget)
        if not faults.out_of_memory(error):
            return fault
        return replace(fault, free_bytes=self._free(), limit_bytes=self._memory)

    def _free(self) -> int:
        import psutil
        import torch

        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
            if self._memory is None:
                return free
            return min(free, self._memory - torch.cuda.memory_reserved(self._device))
        room = self._limit.left()
        return min(psutil.virtual_memory().available, memory_bytes()) if room is None else room

    def _measure(self, kind: TrialKind, flat: dict[str, Any]) -> RankReport:
        import torch

        from ringray.lab.kinds.base import RankContext
        from ringray.lab.trial.config import TrialConfig

        config: TrialConfig = TrialConfig.from_dict(flat)
        torch.set_num_threads(config.ring.threads)
        context = RankContext(self._rank, self._device, self._group, self._side)
        watch = Watch(self._gpu)
        report = kind.run(config, context)
        report.values |= {name: [value] for name, value in watch.stop().items()}
        HERE.enter("")
        return report


class MemoryLimit:
    """Memory limit of a CPU rank: its usage at the start of the first trial plus ``limit`` bytes,
    None for no limit. Takes effect with :meth:`impose`.

    The kernel enforces it (``RLIMIT_DATA``: all private writable memory) on everything in the
    process: an allocation beyond it fails as on a full device.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._most: int | None = None

    def impose(self) -> None:
        """Makes allocations beyond the limit fail; the first call sets the baseline."""
        if self.limit is None:
            return
        if self._most is None:
            self._most = in_use() + self.limit
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = self._most if hard == resource.RLIM_INFINITY else min(self._most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))

    def lift(self) -> None:
        """Suspends the limit: a rank without memory must still be able to report that."""
        if self.limit is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def left(self) -> int | None:
        """Returns the bytes below the limit, None without one."""
        return None if self._most is None else max(0, self._most - in_use())


def in_use() -> int:
    """Returns the bytes of private writable memory of this process, as the kernel counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no line VmData")


def _log() -> str:
    """Returns the file to which Ray redirects stderr; empty if it is not a file."""
    with contextlib.suppress(OSError):
        path = str(Path("/proc/self/fd/2").readlink())
        return path if path.endswith(".err") else ""
    return ""


def _address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _choose_interface() -> None:
    """Names the interface of this node's address to gloo, which would resolve the host name; that
    may fail."""
    import psutil

    address = _address()
    with contextlib.suppress(OSError):
        for name, addresses in psutil.net_if_addrs().items():
            if any(a.family == socket.AF_INET and a.address == address for a in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
