"""``use_ring``: context parallelism of Hugging Face Accelerate on the ring.

Accelerate's own ``prepare`` still removes the causal masks of transformers models, and refuses
models whose layers have other masks: a block of ``context_parallel`` has one mask for all calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.comm.ring import RingGroup, connect
from ringray.models.sdpa import context_parallel

if TYPE_CHECKING:
    from accelerate import Accelerator

_IGNORED = -100  # label that transformers' losses skip
_FORWARD = "a forward in maybe_context_parallel"


def use_ring(accelerator: Accelerator, **options: Any) -> None:
    """Makes ``accelerator.maybe_context_parallel`` route attention to the ring of its ``cp`` mesh.

    Call it once, before or after ``prepare``; the training loop stays as it is. In one process the
    ring is of one rank, so that the same program runs there.

    Prepared models refuse to train outside of the block, and labels that they would shift on the
    rows of a rank. If they get ``shift_labels`` without ``num_items_in_batch``, they get that too:
    the average over ranks, which FSDP takes of gradients, is then the mean over all labels of the
    ring, however many of them a rank holds.

    Args:
        accelerator: of Accelerate 1.15 or newer, with a ``ParallelismConfig(cp_size=...)``.
        options: keywords of ``ringray.context_parallel`` for every block: ``partition``,
            ``transport``, ``backend``, ``pad_values`` and others.

    Raises:
        ValueError: several processes without a ``cp`` mesh, or a second call; in the block, on
            every rank, what ``ringray.context_parallel`` refuses, or a length that ranks do not
            share evenly without ``pad_values``.
    """
    if "maybe_context_parallel" in vars(accelerator):
        raise ValueError("accelerator: got one that has a ring, expected one call of use_ring")
    config, mesh = accelerator.parallelism_config, None
    if config is not None and config.cp_enabled:
        mesh = accelerator.torch_device_mesh["cp"]
    elif accelerator.num_processes > 1:
        raise ValueError(
            f"accelerator: got {accelerator.num_processes} processes without context parallelism, "
            "expected Accelerator(parallelism_config=ParallelismConfig(cp_size=...))"
        )
    blocks, prepare = _Blocks(mesh, options), accelerator.prepare
    accelerator.maybe_context_parallel = blocks.block
    accelerator.prepare = lambda *objects, **options: blocks.watch(prepare(*objects, **options))
    blocks.watch(accelerator._models)


class _Blocks:
    """The blocks of one accelerator, one after another. ``inside``: in one of them."""

    def __init__(self, group: RingGroup, options: dict[str, Any]) -> None:
        self.group, self.options, self.comm = group, options, connect(group)
        self.inside = False

    @contextmanager
    def block(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[Tensor] | None = None,
    ) -> Iterator[None]:
        """Routes attention; in place of ``Accelerator.maybe_context_parallel``."""
        # A label of padding would count: without ``pad_values`` there is no padding.
        options = {
            "buffers": buffers or (),
            "buffer_seq_dims": buffer_seq_dims or (),
            "no_restore_buffers": no_restore_buffers or (),
            "pad_values": None,
            **self.options,
        }
        with context_parallel(self.group, **options):
            self.inside = True
            try:
                yield
            finally:
                self.inside = False

    def watch(self, objects: Any) -> Any:
        """Checks what the models among ``objects`` are called with, from now on."""
        for x in objects if isinstance(objects, tuple | list) else [objects]:
            if isinstance(x, nn.Module):
                # Before FSDP's own hook, which waits for the other ranks.
                hook = self._before_forward
                x.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        return objects

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shifted = kwargs.get("shift_labels")
        with refusing(self.comm):
            if not self.inside and module.training and torch.is_grad_enabled():
                raise ValueError(
                    "model: got a step of training outside of accelerator.maybe_context_parallel, "
                    "expected one inside, where the ring is"
                )
            if self.inside and shifted is None and kwargs.get("labels") is not None:
                raise ValueError(
                    "labels: got them without shift_labels, expected shift_labels="
                    "F.pad(labels, (0, 1), value=-100)[:, 1:] among the buffers, because the next "
                    "token of a rank's last row is on another rank"
                )
            if self.inside:
                agree(self.comm, AgreedCall(_FORWARD, arguments=sorted(kwargs)))
        if self.inside and shifted is not None and kwargs.get("num_items_in_batch") is None:
            count = (shifted != _IGNORED).sum()
            self.comm.sum(count, "labels of the ring")
            kwargs = kwargs | {"num_items_in_batch": count / self.comm.world_size}
        return args, kwargs
