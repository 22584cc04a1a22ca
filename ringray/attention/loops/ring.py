"""The ring loop: chunks walk from rank to rank while each rank computes with those that it holds.

Per step: post the transfers that begin, compute with the chunks at hand and merge, wait for the
transfers that are due, drop the chunks that were computed with. ``traffic.script`` lists transfers
and computations of each step; the loop does not know the route. Sums of gradients follow one step
behind the chunk that they belong to, in fp32, and come home.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

import ringray_kernels
from ringray.attention.loops.chunks import Chunk, ChunkShape, Result
from ringray.comm.batch import Batch, Pending
from ringray.traffic.walk import Rows
from ringray_kernels import State
from ringray_kernels.merge import merge_sinks_

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringray.attention.problem import RankProblem
    from ringray.attention.tensor_arguments import ScoreParameters
    from ringray.comm.ring import Comm
    from ringray.traffic.script import Key, Message, Script, Step, Visit


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: RankProblem,
    comm: Comm,
    parameters: ScoreParameters,
    scales: tuple[Tensor, ...] = (),
) -> Result:
    """Computes this rank's output over the keys of all ranks. ``scales``: of q, k and v if they are
    quantized; those of k and v travel with them.

    Saved are q, k, v, out, lse and, where the backward pass walks back from here, the chunks that
    were received last.
    """
    script, to_keep = problem.script("forward"), _kept(problem)
    ring = InFlight(comm, problem.rank, Chunk((k, v, *scales[1:]), problem.own))
    state: State | None = None
    bias = parameters.bias()
    to_attend = sum(bool(visit.need) for visit in script.visits)
    for number, step in enumerate(script.steps):
        # First of all, so that the messages travel while this step computes.
        ring.post(number, step)
        for visit in step.visits:
            to_attend -= bool(visit.need)
            if visit.need or state is None:  # the first visit sets the state, even of no rows
                # The running output stays fp32 until the last chunk has been merged.
                out_dtype = None if to_attend else problem.quantized_from or q.dtype
                with comm.computing(number, f"chunk {visit.owner}"):
                    # The chunk gets no name here, which would keep it until the next step.
                    state = _attend(
                        (q, *scales[:1]),
                        ring.held[visit.key],
                        visit,
                        problem,
                        bias,
                        state,
                        out_dtype,
                    )
        ring.wait(number)
        ring.drop(visit.key for visit in step.visits if visit.key not in to_keep)
    ring.finish()
    assert state is not None
    # A sink is one more key without a value; it is merged once, after the keys of all ranks.
    if parameters.sinks is not None:
        merge_sinks_(*state, parameters.sinks)
    extra = [x for key, rows in to_keep.items() for x in ring.held[key].cut(rows)]
    return Result(*state, (q, k, v, *state, *extra))


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    problem: RankProblem,
    comm: Comm,
    parameters: ScoreParameters,
) -> tuple[Tensor, ...]:
    """Returns dq, dk, dv of this rank's shard in fp32, over the queries and keys of all ranks; and
    of the ``parameters`` the part of the gradient that comes from the pairs computed here."""
    q, k, v, out, lse, *chunks = saved
    delta = ringray_kernels.delta(dout, out, lse, dlse, backend=problem.call.strategy.backend)
    # A kernel may derive delta from out, which lacks the part of a gradient of lse.
    matching = out if dlse is None else None
    bias = parameters.bias(with_gradient=True)
    script, rank, own = problem.script("backward"), problem.rank, problem.own
    keys_walk = problem.walks.travelling == "keys"
    queries, keys = (q, dout, lse, delta), (k, v)
    # What travels takes its sum of gradients along; what stays adds to its own here.
    moving, summed = (keys, keys) if keys_walk else (queries, (q,))
    staying, added = (queries, (q,)) if keys_walk else (keys, keys)
    ring = InFlight(comm, rank, Chunk(moving, own), summed)
    stay = Side(rank, own, staying, ChunkShape(added, torch.float32).zeros(own).tensors)
    # A reverse walk begins with the chunks that came last in the forward pass.
    for (key, rows), *pair in zip(script.kept, chunks[::2], chunks[1::2], strict=True):
        ring.held[key] = Chunk(tuple(pair), rows)
    work = _work(script, rank, _halves(q, k))
    for number, step in enumerate(script.steps):
        ring.post(number, step)
        for visit, heads in work[number]:
            if visit.sums:  # this rank is the first on the walk to add to them
                ring.sums[visit.key] = ring.zeros(visit.sums)
            if visit.need:
                with comm.computing(number, f"chunk {visit.owner}"):
                    _differentiate(
                        stay, ring.side(visit), heads, matching, problem, bias, keys_walk
                    )
        ring.wait(number)
        ring.drop(visit.key for visit in step.visits)
    ring.finish()
    # The sums of the own chunk have been around the ring and are complete.
    home = ring.sums[rank, 0].tensors
    dq, dk, dv = (*stay.gradients, *home) if keys_walk else (*home, *stay.gradients)
    return dq, dk, dv, *parameters.gradients(lse, delta, bias)


def _kept(problem: RankProblem) -> dict[Key, Rows]:
    """Returns the rows of chunks that the backward pass of ``problem`` begins with."""
    return dict(problem.script("backward").kept) if problem.backward == "reverse" else {}


def _attend(
    queries: tuple[Tensor, ...],
    held: Chunk,
    visit: Visit,
    problem: RankProblem,
    bias: tuple[Tensor, ...],
    state: State | None,
    out_dtype: torch.dtype | None,
) -> State:
    rows = visit.need or visit.held
    hop = (problem.rank, problem.own, visit.owner, rows)
    (q, *of_queries), (k, v, *of_keys) = queries, held.cut(rows)
    return problem.attend(
        q,
        k,
        v,
        problem.intervals(*hop, q.device),
        state,
        out_dtype,
        scales=(*of_queries, *of_keys) or None,
        **problem.by_position(*hop, slice(None), q.device, bias),
    )


class Side(NamedTuple):
    """Rows of one rank in a backward pass: q, dout, lse and delta, or k and v; and their gradients
    in fp32, to be added to."""

    rank: int
    rows: Rows
    operands: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


class Heads(NamedTuple):
    """Some query heads, and the K/V heads that they share."""

    heads: slice
    kv_heads: slice


_EVERY = Heads(slice(None), slice(None))


def _of(heads: slice, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns views of some heads, or the tensors where that is all of them."""
    return tensors if heads == slice(None) else tuple(x[:, heads] for x in tensors)


def _differentiate(
    stay: Side,
    visiting: Side,
    share: Heads,
    out: Tensor | None,
    problem: RankProblem,
    bias: tuple[Tensor, ...],
    keys_walk: bool,
) -> None:
    """Adds the gradients of some heads of two ranks' rows. ``out``: of this rank, if delta is its
    rowsum with dout."""
    queries, keys = (stay, visiting) if keys_walk else (visiting, stay)
    device = keys.operands[0].device
    hop = (queries.rank, queries.rows, keys.rank, keys.rows)
    *of_queries, dq = _of(share.heads, *queries.operands, *queries.gradients)
    k, v, dk, dv = _of(share.kv_heads, *keys.operands, *keys.gradients)
    ours = None
    if out is not None and queries.rank == problem.rank:
        (ours,) = _of(share.heads, *Chunk((out,), problem.own).cut(queries.rows))
    positional = problem.by_position(*hop, share.heads, device, bias)
    ranges = problem.intervals(*hop, device)
    problem.differentiate(
        tuple(of_queries), k, v, ranges, dq=dq, dk=dk, dv=dv, out=ours, **positional
    )


def _halves(q: Tensor, k: Tensor) -> tuple[Heads, ...]:
    """Returns the heads in two halves, or all at once where there is one K/V head."""
    half = k.shape[1] // 2
    if half == 0:
        return (_EVERY,)
    middle = half * (q.shape[1] // k.shape[1])
    return Heads(slice(middle), slice(half)), Heads(slice(middle, None), slice(half, None))


def _work(script: Script, rank: int, halves: tuple[Heads, ...]) -> list[list[tuple[Visit, Heads]]]:
    """Lists by step the computations of a backward pass.

    Half of the own chunk's work is kept for the last step, so that the transfers of sums that come
    home have something to hide behind.
    """
    *early, last = [[(visit, _EVERY) for visit in step.visits] for step in script.steps]
    for work in early:
        for i, (visit, _) in enumerate(work):
            if visit.owner == rank:
                work[i] = visit, halves[0]
                last += [(visit, half) for half in halves[1:]]
    return [*early, last]


class InFlight:
    """The chunks at this rank while a script is executed, and the messages under way.

    ``held``: chunks by owner and part, this rank's own among them as part 0. ``sums``: of gradients
    in the same way, made here and not yet sent; the own ones stay, and those that come home are
    added to them.
    """

    def __init__(
        self, comm: Comm, rank: int, own: Chunk, sums_like: tuple[Tensor, ...] = ()
    ) -> None:
        self._comm, self._rank = comm, rank
        self._chunk, self._sum = ChunkShape(own.tensors), ChunkShape(sums_like, torch.float32)
        self.held: dict[Key, Chunk] = {(rank, 0): own}
        self.sums: dict[Key, Chunk] = {(rank, 0): self._sum.zeros(own.rows)}
        self._pending: defaultdict[int, list[tuple[Pending, list[tuple[Key, Chunk]]]]] = (
            defaultdict(list)
        )

    def zeros(self, rows: Rows) -> Chunk:
        """Makes a sum to add gradients to."""
        return self._sum.zeros(rows)

    def side(self, visit: Visit) -> Side:
        """Returns the part of a chunk and of its sum that a visit computes with."""
        key, rows = visit.key, visit.need
        return Side(visit.owner, rows, self.held[key].cut(rows), self.sums[key].cut(rows))

    def post(self, number: int, step: Step) -> None:
        """Starts the transfers of one step; one batch for those that end together."""
        for due, label, together in step.batches:
            batch = Batch(self._comm.hop(f"step {number}"), label)
            arriving: list[tuple[Key, Chunk]] = []
            for message in together:
                if message.send:
                    self._send(message, batch)
                    continue
                chunk = (self._chunk if message.chunk else self._sum).empty(message.rows)
                for x in chunk.tensors:
                    batch.receive(x, message.peer)
                # A chunk is used as it comes; a sum is added to what is here, once it has come.
                if message.chunk:
                    self.held[self._key(message)] = chunk
                else:
                    arriving.append((self._key(message), chunk))
            self._pending[due].append((self._comm.post(batch), arriving))

    def _send(self, message: Message, batch: Batch) -> None:
        key, source = self._key(message), self.held if message.chunk else self.sums
        for x in source[key].cut(message.rows):
            batch.send(x.contiguous(), message.peer)
        if not message.chunk:
            del self.sums[key]  # the batch keeps it until it is sent

    def _key(self, message: Message) -> Key:
        return message.owner, 0 if message.owner == self._rank else message.part

    def wait(self, step: int) -> None:
        """Waits for the transfers due at ``step`` and adds the sums that came."""
        for pending, arriving in self._pending.pop(step, ()):
            pending.wait()
            for key, part in arriving:
                self.sums[key].add(part)

    def drop(self, keys: Iterable[Key]) -> None:
        """Frees chunks, except this rank's own."""
        for key in keys:
            if key[0] != self._rank:
                del self.held[key]

    def finish(self) -> None:
        """Waits for what is still under way: transfers to ranks that take them later."""
        for step in sorted(self._pending):
            self.wait(step)
