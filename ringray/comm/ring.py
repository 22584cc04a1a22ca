"""The ranks of a ring: batches of sends and receives behind one object.

``connect(group)`` returns a ``Comm``; without a process group, or in a group of one, it is a null
ring through which the same code computes locally. All ranks post the same batches in the same
order: unbatched or differently ordered sends deadlock on NCCL.

On CUDA a batch begins after the work queued on the current stream and then runs on NCCL's own
stream, beside the work queued afterwards; ``wait`` makes the current stream wait for it, not the
host or the device. Process groups made with ``is_high_priority_stream``, as on the platform, start
it before the kernels that it hides behind.

Integers go through host memory, so that no rank waits for its device to learn what others say: by
the group's own CPU backend, or by a gloo one made beside it on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringray.comm import host_staging
from ringray.comm.batch import METER, Batch, Packed, Pending, WaitScope
from ringray.instruments.progress import HERE

# What callers may name a ring by; None is the default group if there is one, otherwise local.
RingGroup: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"

# Of messages, on backends that match them by tag: not 0, the default of a user's own messages.
_TAG = 0x72696E67
_TAG_OF_INTEGERS = _TAG + 1
_SMALL_BYTES = 1 << 16  # of the tensors for one peer; larger ones are not copied


class Comm:
    """The ranks of one ring, seen from one of them.

    ``fold`` and ``place`` make it a part of a larger ring: its rank r is rank ``r * fold + place``
    of the group. ``through_host``: messages are staged in host memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        fold: int = 1,
        place: int = 0,
        size: int | None = None,
        through_host: bool = False,
    ) -> None:
        self._group, self._fold, self._place = group, fold, place
        self._through_host = through_host
        rank, everyone = (0, 1) if group is None else (group.rank(), group.size())
        self.rank = (rank - place) // fold
        self.world_size = everyone if size is None else size
        self.meter = METER

    def check(self, device: torch.device, *, staged: bool, collective: bool = False) -> None:
        """Raises ValueError if the group's backend cannot send tensors of ``device``, or, if
        ``collective``, not sum and gather them."""
        if self._group is None:
            return
        if not staged and device.type not in (x.type for x in self._group._device_types):
            raise ValueError(
                f"group: {dist.get_backend(self._group)} cannot send tensors of {device.type}"
            )
        if device.type == "cpu" and not staged:
            return
        backend = dist.get_backend(self._group)
        if staged and backend != "gloo":
            raise ValueError(
                "transport 'staged' sends from host memory, which needs a gloo group; got "
                f"{backend} (torch.distributed.new_group(backend='gloo') makes one)"
            )
        # Its collectives take tensors of a GPU, its messages do not.
        if not (staged or collective) and backend == "gloo" and device.type == "cuda":
            raise ValueError(
                "group: gloo cannot send tensors of a GPU; take transport 'staged' or an nccl group"
            )

    def open(self, device: torch.device) -> None:
        """Makes the communicator of the group on ``device``, once; all ranks call it. NCCL's comes
        with the first operation, in which all ranks must take part: some have no first batch."""
        group = self._group
        if group is None or group in _opened:
            return
        staged = torch.device(device.type) not in group._device_types
        if not staged and group._get_backend(device).supports_coalescing:
            _opened.add(group)
            dist.all_reduce(torch.zeros((), dtype=torch.float32, device=device), group=group)

    def staged(self) -> Comm:
        """Returns the same ranks with messages through host memory."""
        return Comm(
            self._group, fold=self._fold, place=self._place, size=self.world_size, through_host=True
        )

    def folded(self, fold: int) -> tuple[Comm, Comm]:
        """Returns two dimensions: the group of ``fold`` neighbouring ranks that holds this one, and
        the ring of the ranks with its place in their groups."""
        group_number, place = divmod(self.rank, fold)
        host = self._through_host
        near = Comm(self._group, place=group_number * fold, size=fold, through_host=host)
        far = Comm(
            self._group, fold=fold, place=place, size=self.world_size // fold, through_host=host
        )
        return near, far

    def hop(self, place: str) -> str:
        """Names a place in the current pass, such as a step, for timelines."""
        return f"{self.meter.running}, {place}"

    def computing(self, step: int, what: str) -> AbstractContextManager[None]:
        """Records the computation of one step with a chunk or some heads in the timeline."""
        if self.meter.timeline is None:
            return nullcontext()
        return self.meter.timeline.span("compute", self.hop(f"step {step}"), what)

    def post(self, batch: Batch) -> Pending:
        """Starts all operations of a batch at once."""
        if not batch.operations:
            return Pending((), batch)
        assert self._group is not None, "a null ring has no peers"
        HERE.hop = batch.hop
        self.meter.sent_bytes += batch.payload(sent=True)
        self.meter.messages += sum(is_send for is_send, _, _ in batch.operations)
        if self._through_host:
            pending = host_staging.post(batch, self._start)
        else:
            pending = Pending(self._start(batch), batch)
        if self.meter.tape is not None:
            self.meter.tape.posted(self.post, batch, pending)
        return pending

    def _start(self, batch: Batch) -> Sequence[dist.Work]:
        group, fold, place = self._group, self._fold, self._place
        assert group is not None
        if group._get_backend(batch.operations[0][1].device).supports_coalescing:
            operations = []
            for is_send, tensor, peer in batch.operations:
                post, to = dist.isend if is_send else dist.irecv, peer * fold + place
                operations.append(dist.P2POp(post, tensor, group=group, tag=_TAG, group_peer=to))
            return dist.batch_isend_irecv(operations)
        # Other backends send one by one, and what is small costs by the message, not by the byte.
        works: list[Any] = []
        for (is_send, peer), tensors in batch.by_peer().items():
            exchange = group.send if is_send else group.recv
            packed = len(tensors) > 1 and sum(x.nbytes for x in tensors) <= _SMALL_BYTES
            for message in [Packed(tensors, filled=is_send)] if packed else tensors:
                buffer = message.buffer if isinstance(message, Packed) else message
                works.append(exchange([buffer], peer * fold + place, _TAG))
                if isinstance(message, Packed) and not is_send:
                    works.append(message)
        return works

    def largest(self, values: Sequence[int], hop: str) -> list[int]:
        """Returns the largest of each of the ``values`` over all ranks; all have the same count.
        ``hop``: named by an error.

        In log2(ranks) rounds, one message each: a maximum may count a rank twice.
        """
        most = np.array(values)  # arrays, which no mode or transform of torch changes
        if self._group is None:
            return most.tolist()
        rank, ranks, distance = self.rank, self.world_size, 1
        with WaitScope(hop):
            host = _host(self._group)
            while distance < ranks:
                came = np.empty_like(most)
                of_most, of_came = torch.from_numpy(most), torch.from_numpy(came)
                works = (
                    host.recv([of_came], (rank - distance) % ranks, _TAG_OF_INTEGERS),
                    host.send([of_most], (rank + distance) % ranks, _TAG_OF_INTEGERS),
                )
                for work in works:
                    work.wait()
                most = np.maximum(most, came)
                distance *= 2
        return most.tolist()

    def gather_integers(self, values: list[int], hop: str) -> list[list[int]]:
        """Returns the ``values`` of every rank, by rank; all have the same count. ``hop``: named
        by an error."""
        if self._group is None:
            return [values]
        mine = np.array(values)
        parts = [np.empty_like(mine) for _ in range(self.world_size)]
        with WaitScope(hop):
            tensors = [torch.from_numpy(x) for x in parts]
            _host(self._group).allgather([tensors], [torch.from_numpy(mine)]).wait()
        return [part.tolist() for part in parts]

    def sum(self, tensor: Tensor, hop: str) -> None:
        """Sums a tensor over all ranks, in place."""
        if self._group is not None:
            with WaitScope(hop):
                dist.all_reduce(tensor, group=self._group)

    def gather(self, parts: list[Tensor], tensor: Tensor, hop: str) -> None:
        """Copies the tensors of all ranks to ``parts``, by rank; all have one shape."""
        if self._group is None:
            parts[0].copy_(tensor)
            return
        with WaitScope(hop):
            dist.all_gather(parts, tensor, group=self._group)


_opened: WeakSet[dist.ProcessGroup] = WeakSet()
_hosts: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


def _host(group: dist.ProcessGroup) -> Any:
    """Returns the backend of ``group`` for host memory. Where it has none, makes one of the same
    ranks and the same timeout, which ends with the group; all ranks do so at the same call."""
    backend = _hosts.get(group)
    if backend is None:
        devices = group._device_types
        if torch.device("cpu") in devices:
            backend = group._get_backend(torch.device("cpu"))
        else:
            store = cast("Any", dist).PrefixStore("ringray", group.get_group_store())
            backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout_of(group))
        _hosts[group] = backend
    return backend


def timeout_of(group: Any) -> Any:
    """Returns how long the ranks of a group wait for each other, a ``timedelta``."""
    return group._get_backend(group._device_types[0]).options._timeout


def connect(group: RingGroup) -> Comm:
    """Returns the ring of ``group``; None is the default group if there is one, otherwise local."""
    members = _process_group(group)
    if members is None and dist.is_available() and dist.is_initialized():
        members = dist.group.WORLD
    if members is not None and members.size() == 1:
        members = None
    return Comm(members)


def _process_group(group: RingGroup) -> dist.ProcessGroup | None:
    """Returns the process group that ``group`` names: of a mesh, the group of its dimension."""
    if isinstance(group, DeviceMesh):
        # A ring has one order of ranks, which a mesh of more dimensions does not say.
        if group.ndim != 1:
            raise ValueError(
                "group: got a DeviceMesh of several dimensions, expected one of them, as mesh['cp']"
            )
        if group.get_coordinate() is None:
            raise ValueError("group: got a DeviceMesh without this rank, expected one that has it")
        return group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group: got {type(group).__name__}, expected a process group, a DeviceMesh of one "
            "dimension, or None"
        )
    return group


# Code that torch.compile traces holds a group by its name and looks it up when it runs.


def name_of(group: RingGroup) -> str | None:
    """Returns the name that ``connect_named`` takes."""
    members = _process_group(group)
    return None if members is None else members.group_name


def place_in(group: RingGroup) -> tuple[int, int]:
    """Returns this process's rank in the ring of ``group``, and the size of the ring."""
    members = _process_group(group)
    if members is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(members), dist.get_world_size(members)


def _named(name: str | None) -> dist.ProcessGroup | None:
    return cast("Any", dist).distributed_c10d._resolve_process_group(name) if name else None


def members(name: str | None) -> list[int]:
    """Returns the global ranks of a ring, in its order, by the name of its group."""
    if name is None and not (dist.is_available() and dist.is_initialized()):
        return [0]
    return dist.get_process_group_ranks(_named(name))


def connect_named(name: str | None, ranks: int) -> Comm:
    """Returns the ring of a group by its name.

    Raises:
        ValueError: the ring does not have ``ranks`` ranks any more.
    """
    comm = connect(_named(name))
    if comm.world_size != ranks:
        raise ValueError(
            f"group: compiled for a ring of {ranks}, but it now has {comm.world_size} ranks; "
            "torch.compiler.reset() forgets what was compiled"
        )
    return comm
