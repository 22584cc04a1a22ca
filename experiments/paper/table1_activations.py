"""Table 1 of the ring attention paper: bytes of one layer's largest activation, bf16.

    python experiments/paper/table1_activations.py

Beside each printed formula stand the bytes that a forward pass has on this machine, counted: of
the largest tensor that an operator of attention or MLP makes, of a real layer. On a ring, whose
tensors live inside one operator, all that are alive at the peak count, Q, K and V among them. The
sizes are small; the formulas are evaluated at the same. The last row is the memory model's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comparison import Row, show
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ringray
from ringray.lab.predict import cost_model, hardware
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.trial.measurement import peak_memory
from ringray.models.decoder import GatedMLP, WholeScores
from ringray.models.sizes import Model
from ringray.training.recipe import Degrees

RANKS = 3  # of the ring; rings of more need as much
C, N, D = 256, 4, 128  # tokens of a block, heads, head dim: h/n as of LLaMA 7B
S, H = RANKS * C, N * D
DTYPE = torch.bfloat16
ROWS = 32  # of a blockwise MLP, so few that its output is the largest
KIB = 1 << 10


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator makes; views are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and looks at what it returns."""
        out = func(*args, **(kwargs or {}))
        sources = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        for made in _tensors(out):
            if made.untyped_storage().data_ptr() not in sources:
                self.bytes = max(self.bytes, made.nbytes)
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def largest(work: Callable[[], object]) -> int:
    """Returns the bytes of the largest tensor that ``work`` makes."""
    with torch.no_grad(), Largest() as mode:
        work()
    return mode.bytes


def counted() -> dict[str, int]:
    """Returns the largest tensors of attention and MLP by architecture, of one layer."""
    x = torch.randn(1, S, H, dtype=DTYPE)
    q, k, v = (torch.randn(1, N, S, D, dtype=DTYPE) for _ in range(3))
    plain, blockwise = GatedMLP(H, 4 * H, None, dtype=DTYPE), GatedMLP(H, 4 * H, ROWS, dtype=DTYPE)
    whole: nn.Module = WholeScores(H, N, head_dim=D, dtype=DTYPE)
    with tempfile.TemporaryDirectory() as folder:
        _join(folder, 0, 1)
        counts = {
            "whole": largest(lambda: whole(x)),
            "blocks": largest(lambda: ringray.ring_attention(q, k, v, causal=False)),
            "plain": largest(lambda: plain(x)),
            "blockwise": largest(lambda: blockwise(x)),
            "rank": largest(lambda: blockwise(x[:, :C])),
        }
        dist.destroy_process_group()
        spawn(_rank, (folder,), nprocs=RANKS)
        counts["ring"] = max(int(path.read_text()) for path in Path(folder).glob("peak*"))
    return counts


def _join(folder: str, rank: int, ranks: int) -> None:
    meeting = f"file://{folder}/meeting{ranks}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)


def _rank(rank: int, folder: str) -> None:
    """Counts what attention of a rank has alive at its peak."""
    torch.set_num_threads(1)
    _join(folder, rank, RANKS)
    shards = [torch.randn(1, N, C, D, dtype=DTYPE) for _ in range(3)]
    work = torch.no_grad()(lambda: ringray.ring_attention(*shards, causal=False))
    work()  # what is kept from the first call on is no activation
    peak = sum(x.nbytes for x in shards) + peak_memory(work, torch.device("cpu"))
    Path(folder, f"peak{rank}").write_text(str(peak))
    dist.destroy_process_group()


def rows() -> list[Row]:
    """Returns all cells; batch size 1."""
    counts = counted()
    matrix = "2bns²: the matrix of scores of n heads"
    view = "2bsh: blocks of K/V are views of what a device has"
    live = f"{counts['ring'] / (C * H):.1f}bch; six blocks of bf16 alone are 12bch"
    cells = [
        ("vanilla, attention, 2bns²", 2 * N * S**2, counts["whole"], ""),
        ("vanilla, MLP, 8bsh", 8 * S * H, counts["plain"], ""),
        ("vanilla, total, 2bhs²", 2 * H * S**2, max(counts["whole"], counts["plain"]), matrix),
        ("memory-efficient, attention, 2bsh + 4bch", 2 * S * H + 4 * C * H, counts["blocks"], view),
        ("memory-efficient, total, 8bsh", 8 * S * H, max(counts["blocks"], counts["plain"]), ""),
        ("blockwise MLP, total, 2bsh", 2 * S * H, max(counts["blocks"], counts["blockwise"]), ""),
        ("ring, attention, 6bch", 6 * C * H, counts["ring"], live),
        ("ring, MLP, 2bch", 2 * C * H, counts["rank"], ""),
        ("ring, total, 6bch", 6 * C * H, max(counts["ring"], counts["rank"]), live),
    ]
    table = [Row(cell, printed / KIB, ours / KIB, note) for cell, printed, ours, note in cells]
    ours = ring_bytes()
    note = f"{ours / (C * H):.1f}bch: Q, K, V; two of K/V on the way; out in fp32, the part to add"
    return [*table, Row("ring, attention, the memory model", None, ours / KIB, note)]


def ring_bytes() -> int:
    """Returns the predicted peak of a forward pass without a mask, of a rank with C rows."""
    on = hardware.parse_fleet(f"h100:1x{RANKS}")
    model = Model("run", 1, H, N, N, D, 4 * H, 256)
    config = TrainingRequest(model, on, S, 1).attention(
        Degrees(cp=RANKS), causal=False, direction="forward"
    )
    return cost_model.predict(config, on).peak_memory_bytes


if __name__ == "__main__":
    show(f"Table 1: largest activation of a layer, s = {S}, c = {C}, h = {H}", rows(), "KiB")
