"""torchtitan's own Trainer on CPUs, with gloo: prints its losses as JSON, by case.

``python titan_program.py RANKS=CASE,CASE... ...``: each argument is a group of processes, and all
run at the same time. A case is an SPMD backend of torchtitan, or ``plain`` for its own attention,
and a number of steps: ``2=partial_dtensor:50``. The processes are forked, since torchtitan takes
longer to import than to train.

Parts of torchtitan that need a GPU are replaced: what asks a device about its memory, the barrier
of one device, the compiled kernel of FlexAttention (by SDPA with the same mask), and FSDP's
reduction by NCCL's scaled sums. Model, data loading, shards of a batch, loss and optimizer are its.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from ringray.plugins.torchtitan import use_ring  # noqa: E402

SEQ_LEN, BATCH, LAYERS = 64, 2, 2
CUTS = (21, 33)  # where the second document of each row begins


class Words(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


class Documents(BaseDataLoader):  # type: ignore[misc]
    """Packed documents that follow a rule; the first tokens have no labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(0)
        pieces = [(torch.arange(cut), torch.arange(SEQ_LEN - cut)) for cut in CUTS]
        positions = torch.stack([torch.cat(x) for x in pieces])
        while True:
            first = torch.randint(97, (BATCH, 1), generator=generator)
            ids = (first + 3 * torch.arange(SEQ_LEN + 1)) % 97
            labels = ids[:, 1:].clone()
            labels[:, : SEQ_LEN // 4] = -100
            yield {"input": ids[:, :-1].clone(), "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        pass


class Memory:
    device_name = "cpu"

    def __init__(self, *_: Any) -> None:
        pass

    def reset_peak_stats(self) -> None:
        pass

    def get_peak_stats(self) -> Any:
        return SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, **scores: Any) -> tuple[Tensor, None]:
    if not hasattr(block_mask, "dense"):  # once for all layers
        shape = len(q), 1, q.shape[2], k.shape[2]
        block_mask.dense = create_mask(block_mask.mask_mod, *shape, device="cpu")
    options = {name: scores[name] for name in ("scale", "enable_gqa")}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=block_mask.dense, **options), None


def as_ever(model: Any) -> None:
    """Gives every model the same weights, however it is sharded."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in sorted(model.named_parameters()):
        full = torch.randn(weight.shape, generator=generator) * 0.02
        full = torch.ones(weight.shape) if "norm" in name else full
        if isinstance(weight, DTensor):
            full = distribute_tensor(full, weight.device_mesh, weight.placements)
        weight.data.copy_(full)


def losses(case: str) -> list[float]:
    """Returns what the Trainer logs of each step."""
    kind, _, steps = case.partition(":")
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    config.loss = CrossEntropyLoss.Config()
    config.tokenizer, config.dataloader = Words.Config(), Documents.Config()
    config.training = TrainingConfig(
        local_batch_size=BATCH,
        seq_len=SEQ_LEN,
        steps=50,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )
    config.parallelism = ParallelismConfig(
        context_parallel_degree=int(os.environ["WORLD_SIZE"]),
        spmd_backend="spmd_types" if kind == "plain" else kind,
    )
    if steps == "50":  # the shorter ones compute layers again
        config.activation_checkpoint = None
    config.validator.enable = config.checkpoint.enable = False
    if kind != "plain":
        use_ring(config)
    parallelize = config.model_spec.parallelize_fn

    def on_gloo(model: Any, **arguments: Any) -> Any:
        parallelized = parallelize(model, **arguments)
        for part in parallelized.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
        return parallelized

    config.model_spec.parallelize_fn = on_gloo
    logged: list[float] = []
    metrics.MetricsProcessor.log = lambda _, __, loss, *___, **____: logged.append(loss)
    trainer = config.build()
    as_ever(trainer.model_parts[0])
    trainer.should_continue_training = lambda: trainer.step < int(steps)
    trainer.train()
    trainer.close()
    return logged


def run(rank: int, size: int, port: int, cases: list[str]) -> None:
    """Runs cases as one rank, which prints the losses if it is the first."""
    os.environ.update(
        {
            "LOCAL_RANK": str(rank),
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
    )
    by_case = {case: losses(case) for case in cases}
    if rank == 0:
        print("losses:", json.dumps(by_case), flush=True)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)  # none of its threads would live on in a fork
    attention.FlexAttention._compiled_flex_attn = staticmethod(sdpa)
    attention._compiled_create_block_mask = create_block_mask
    metrics.build_device_memory_monitor = Memory
    utils.set_pg_timeouts = lambda **_: None
    fork, ranks = multiprocessing.get_context("fork"), []
    for argument in sys.argv[1:]:
        count, _, cases = argument.partition("=")
        size, port = int(count), free_port()
        for rank in range(size):
            options = rank, size, port, cases.split(",")
            ranks.append(fork.Process(target=run, args=options, daemon=True))
            ranks[-1].start()
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for ended in wait([*running]):
            if running.pop(ended).exitcode:  # type: ignore[call-overload]
                sys.exit(1)  # the others, which may wait for it, end too
