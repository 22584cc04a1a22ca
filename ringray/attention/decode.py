"""``ring_decode``: attention of new tokens to a long context that stays sharded over a ring.

Queries meet keys where these are (pass-Q): every rank has the same few queries, attends to its own
keys, and partial results are merged along a tree, so a step sends outputs and lse, never K or V.

On a rank, queries of the heads that share a K/V head are rows of one tile, and keys that all
queries see are cut into ranges that are computed side by side, as views without copies.

Shape legend: B batch, Hq query heads, Hkv key/value heads, G = Hq / Hkv, T new tokens, D head dim,
Dv that of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import ringray_kernels
from ringray.attention.agreement import AgreedCall, agree, exchanging, refusing
from ringray.attention.call import whole
from ringray.attention.loops import exactly
from ringray.attention.other_names import answering_other_names
from ringray.attention.sharded_kv import ShardedKV
from ringray.attention.tensor_arguments import check_sinks
from ringray.base.provenance import version
from ringray.base.units import plain
from ringray.comm.batch import Batch
from ringray.comm.ring import RingGroup, connect
from ringray.traffic.mask import Mask
from ringray.traffic.tree import meetings
from ringray_kernels import State
from ringray_kernels.api import Features, resolve_backend
from ringray_kernels.checks import check_qkv, unusable_scale, unusable_softcap
from ringray_kernels.merge import merge_, merge_sinks_, merged
from ringray_kernels.modes import autocast

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ringray.comm.ring import Comm

_TILE = 64  # query rows of one tile of a kernel
_LEAST_KEYS = 256  # keys of a range: a shorter one is not worth its own tile
_THREAD_ELEMENTS = 1 << 18  # of the keys of one fused call on a CPU, whose threads share its ranges


@answering_other_names
def ring_decode(
    q: Tensor,
    cache: ShardedKV,
    *,
    group: RingGroup = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    global_tokens: int | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns exact softmax attention of the newest tokens over all keys up to each of them.

    Every rank of ``group`` calls it with the same queries, after it has appended the same new keys
    and values to its cache. One token decodes; a chunk of them is a step of a chunked prefill. The
    result is the same on every rank, bit by bit where ranks have equal devices and threads.

    Args:
        q: (B, Hq, T, D), the queries of the newest T tokens of the cache, in its dtype and on its
            device; Hq is a multiple of the cache's Hkv. Without gradient.
        cache: this rank's keys and values.
        group: process group of the ring for which the cache was made; None is the default group if
            one is initialised, otherwise this process alone.
        scale: factor on q . k before the softmax; None is 1 / sqrt(D).
        softcap, sinks: as in ``ring_attention``.
        window: a query at p sees keys ``[p - window, p]``, window + 1 of them; None: all up to p.
        global_tokens: first positions that it sees beside its window (as in StreamingLLM).
        backend: kernels of this rank, ``auto`` or a name of ``ringray_kernels.backends``.
        return_lse: also return the log-sum-exp.

    Returns:
        out (B, Hq, T, Dv) in q's dtype, accumulated in fp32; with ``return_lse`` a tuple (out,
        lse), lse fp32 (B, Hq, T), natural log.

    Raises:
        ValueError: wrong shapes, dtypes or names, a cache of another group, or ranks that disagree
            about the problem; on every rank, before anything is sent.
    """
    comm = connect(group)
    with refusing(comm):
        (q,) = autocast(q)
        _check(q, cache, comm)
        check_sinks(sinks, q)
        problem = _problem(
            q,
            cache,
            plain(scale),
            plain(softcap),
            sinks,
            plain(window),
            plain(global_tokens),
            backend,
        )
        comm.meter.running = "decoding"
        # Before the ranks agree, so that one that fails here leaves none waiting.
        with torch.no_grad(), exactly(q.device), comm.computing(0, "own keys"):
            rows = _by_kv_head(q, cache)
            ranges = _seen(cache, q.shape[2], q.shape[1] // cache.k.shape[1], problem)
            state, *others = (_attend(rows, seen, cache, problem.kernel) for seen in ranges)
            for other in others:
                merge_(*state, *other)
    agree(comm, problem.call(q, cache))
    comm.open(q.device)
    with exchanging(), torch.no_grad(), exactly(q.device):
        state = _merged_over_ranks(state, comm)
        shape = (len(q), -1, q.shape[2], q.shape[1] // cache.k.shape[1])
        out, lse = (x.reshape(*shape, *x.shape[3:]).transpose(2, 3).flatten(1, 2) for x in state)
        if sinks is not None:
            merge_sinks_(out, lse, sinks)
        out = out.to(q.dtype)
    return (out, lse) if return_lse else out


class _Problem(NamedTuple):
    """The checked options of one call, resolved."""

    scale: float
    softcap: float | None
    sinks: bool
    window: int | None
    global_tokens: int | None
    backend: str

    @property
    def kernel(self) -> dict[str, Any]:
        """Returns the keywords of all calls of ``ringray_kernels``."""
        return {"scale": self.scale, "softcap": self.softcap, "backend": self.backend}

    def call(self, q: Tensor, cache: ShardedKV) -> AgreedCall:
        """Returns what all ranks must have in common."""
        batch, heads, tokens, head_dim = q.shape
        return AgreedCall(
            "ring_decode",
            batch=batch,
            heads=heads,
            kv_heads=cache.k.shape[1],
            new_tokens=tokens,
            head_dim=head_dim,
            value_dim=cache.v.shape[3],
            dtype=q.dtype,
            length=cache.length,
            capacity=cache.capacity,
            dealt=cache.dealt,
            partition=cache.partition,
            **self._asdict(),
            version=version(),
        )


def _check(q: Tensor, cache: ShardedKV, comm: Comm) -> None:
    """Checks queries against the cache, and it against the group."""
    if not isinstance(cache, ShardedKV):
        raise ValueError(f"cache: got {type(cache).__name__}, expected a ShardedKV")
    if (cache.rank, cache.ranks) != (comm.rank, comm.world_size):
        raise ValueError(
            f"group: got one of {comm.world_size} ranks, of which this is rank {comm.rank}, for "
            f"the cache of rank {cache.rank} of {cache.ranks}; expected the group of the cache"
        )
    if isinstance(q, Tensor) and q.dim() == 4:
        held, _ = cache.buffers
        if (len(q), q.shape[3]) != (len(held), held.shape[3]):
            raise ValueError(
                f"q: got shape {tuple(q.shape)}, expected batch {len(held)} and head dim "
                f"{held.shape[3]} as the cache has"
            )
        if q.shape[2] > cache.length:
            raise ValueError(
                f"q: got {q.shape[2]} tokens, expected at most the {cache.length} of the cache: "
                "append the keys and values of new tokens first"
            )
    check_qkv(q, *cache.buffers)
    if q.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "q: got a tensor that requires a gradient, expected none: decoding has no backward "
            "pass; call it under torch.no_grad(), or train with ring_attention"
        )
    comm.check(q.device, staged=False)


def _problem(
    q: Tensor,
    cache: ShardedKV,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    global_tokens: int | None,
    backend: str,
) -> _Problem:
    for name, value, least in (("window", window, 0), ("global_tokens", global_tokens, 1)):
        if value is not None and not whole(value, least):
            raise ValueError(
                f"{name}: got {value!r}, expected None or an integer of at least {least}"
            )
    Mask(cache.capacity, window=window, global_tokens=global_tokens)  # checks them
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if wrong := unusable_scale(factor) or unusable_softcap(softcap):
        raise ValueError(wrong)
    cap = None if softcap is None else float(softcap)
    backend = resolve_backend(backend, q, Features(cache.v.shape[3], cap))
    return _Problem(float(factor), cap, sinks is not None, window, global_tokens, backend)


def _by_kv_head(q: Tensor, cache: ShardedKV) -> Tensor:
    """Returns queries (1, B * Hkv, T * G, D): tokens in order, each with all heads of a group."""
    batch, heads, _, head_dim = q.shape
    kv_heads = cache.k.shape[1]
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads)).transpose(2, 3)
    return grouped.reshape(1, batch * kv_heads, -1, head_dim)


class _Seen(NamedTuple):
    """The range of this rank's rows that each query row sees, int64 (T * G,), on the host."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]

    def within(self, first: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the ranges among the rows ``[first, stop)``, as kernels take them."""
        rows = ((x.clip(first, stop) - first).astype(np.int32) for x in self)
        start, end = (torch.from_numpy(x).to(device).unsqueeze(0) for x in rows)
        return start, end


def _seen(cache: ShardedKV, tokens: int, group: int, problem: _Problem) -> list[_Seen]:
    """Returns the keys that the newest tokens see, each with the heads of a group: the global ones
    apart."""
    positions = np.arange(cache.length - tokens, cache.length)
    first = np.zeros_like(positions) if problem.window is None else positions - problem.window
    ranges = [(first, positions + 1)]
    if problem.global_tokens is not None:
        middle = np.minimum(problem.global_tokens, positions + 1)
        ranges = [(np.zeros_like(positions), middle), (np.maximum(first, middle), positions + 1)]
    rows = [[np.searchsorted(cache.positions, x) for x in bounds] for bounds in ranges]
    return [_Seen(*(np.repeat(x, group) for x in bounds)) for bounds in rows]


def _ranges(keys: int, rows: Tensor) -> int:
    """Returns the number of ranges of keys that are worth computing side by side."""
    _, entries, queries, head_dim = rows.shape
    if rows.device.type == "cuda":
        units = torch.cuda.get_device_properties(rows.device).multi_processor_count
        wanted = -(-2 * units // (entries * -(-queries // _TILE)))
    else:  # fused calls take a few ranges of one K/V head at once
        threads = torch.get_num_threads()
        busy = threads == 1 or queries >= _TILE * threads
        wanted = 1 if busy else keys * head_dim * threads // _THREAD_ELEMENTS
    return max(1, min(wanted, keys // _LEAST_KEYS))


def _attend(rows: Tensor, seen: _Seen, cache: ShardedKV, kernel: dict[str, Any]) -> State:
    """Returns attention of ``rows`` (1, B * Hkv, T * G, D) over this rank's keys, fp32.

    Keys that all rows see are cut into ranges of one size; what lies before and after them is
    computed by its intervals.
    """
    k, v = (x.flatten(0, 1) for x in cache.buffers)
    first, stop = int(seen.start[0]), int(seen.end[-1])
    low, common = int(seen.start[-1]), max(0, int(seen.end[0] - seen.start[-1]))
    ranges = _ranges(common, rows)
    size = common // ranges
    high = low + ranges * size
    state = None
    if size:
        keys, values = (x[:, low:high].unflatten(1, (ranges, size)) for x in (k, v))
        queries = rows.transpose(0, 1).expand(-1, ranges, -1, -1).contiguous()
        whole = seen.within(low, low + size, rows.device)
        parts = ringray_kernels.forward(queries, keys, values, *whole, **kernel)
        state = State(*merged(*parts))
    else:
        low = high = first
    for begin, end in ((first, low), (high, stop)):
        if begin < end:
            keys, values = (x[None, :, begin:end] for x in (k, v))
            edge = seen.within(begin, end, rows.device)
            state = ringray_kernels.forward(rows, keys, values, *edge, state=state, **kernel)
    if state is None:  # no key of this rank
        like: dict[str, Any] = {"dtype": torch.float32, "device": rows.device}
        out = torch.zeros((*rows.shape[:3], v.shape[2]), **like)
        state = State(out, torch.full(rows.shape[:3], -torch.inf, **like))
    return state


def _merged_over_ranks(state: State, comm: Comm) -> State:
    """Returns the merge of the states of all ranks; see ``traffic.tree``."""
    shape, split = state.out.shape, state.out.numel()

    def unpacked(packed: Tensor) -> State:
        return State(packed[:split].view(shape), packed[split:].view(shape[:3]))

    mine = torch.cat([x.flatten() for x in state])
    for turn, (peer, deed) in enumerate(meetings(comm.world_size, comm.rank)):
        batch = Batch(comm.hop(f"merge {turn}"), f"with rank {peer}")
        theirs = torch.empty_like(mine)
        if deed in ("swap", "give"):
            batch.send(mine, peer)
        if deed != "give":
            batch.receive(theirs, peer)
        comm.post(batch).wait()
        if deed == "take":
            mine = theirs
        elif deed != "give":
            mine, higher = (mine, theirs) if comm.rank < peer else (theirs, mine)
            merge_(*unpacked(mine), *unpacked(higher))
    return unpacked(mine)
