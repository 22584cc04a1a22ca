"""Fine-tunes a Hugging Face causal model on longer sequences, each dealt over a ring of ranks.

pip install 'ringray[hf]'
torchrun --nproc-per-node 2 docs/examples/finetune.py --data docs --seq-len 2048
torchrun --nproc-per-node 8 docs/examples/finetune.py --model FOLDER --data TEXTS \\
    --seq-len 131072 --rope-theta 5e6 --checkpoints KEPT --export TUNED
python docs/examples/finetune.py --workers 2 --data docs --seq-len 2048  # by Ray Train

``--model``: folder of a pretrained model with its tokenizer; without it, a tiny Llama of random
weights learns bytes. Scaling of RoPE stays as the model has it; ``--rope-theta`` larger than the
model's own fits it to longer sequences. Weights and optimizer are in fp32, computed in the model's
dtype, in which ``--export`` writes them. Documents are packed; checkpoints go on with another
number of ranks.
"""

import argparse
import math
import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

import ringray
import ringray.models.huggingface as hf
from ringray.training.checkpoint import CheckpointError, Checkpoints
from ringray.training.corpus import Corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a pretrained model")
    parser.add_argument("--data", nargs="+", required=True, help="files or folders of text")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--dp", type=int, default=1, help="replicas; the other ranks are rings")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--rate", type=float, help="largest learning rate (default: 1e-5, of random weights 1e-3)"
    )
    parser.add_argument("--rope-theta", type=float, help="base of RoPE's frequencies")
    parser.add_argument("--checkpoints", help="folder; a training goes on from the last one there")
    parser.add_argument("--export", help="folder for the trained model, as from_pretrained loads")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--workers", type=int, help="of Ray Train, instead of torchrun")
    given = parser.parse_args()
    if given.workers:
        by_ray_train(given)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(given)
    dist.destroy_process_group()


def by_ray_train(given: argparse.Namespace) -> None:
    """Trains on the workers of the Ray in RAY_ADDRESS, or of one that is started for it."""
    alone = "RAY_ADDRESS" not in os.environ
    if alone:  # nobody else may use it
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    if alone:
        ray.init(address="local", num_cpus=given.workers, include_dashboard=False)
    for name in ("model", "checkpoints", "export"):  # workers have another working directory
        if path := getattr(given, name):
            setattr(given, name, str(Path(path).resolve()))
    given.data = [str(Path(path).resolve()) for path in given.data]
    scaling = ScalingConfig(num_workers=given.workers, use_gpu=torch.cuda.is_available())
    TorchTrainer(train, train_loop_config=given, scaling_config=scaling).fit()


def load(given: argparse.Namespace) -> tuple[PreTrainedModel, torch.dtype]:
    """Returns a model with weights in fp32, and the dtype that it computes and is stored in."""
    if given.model:
        config = AutoConfig.from_pretrained(given.model)
        dtype = config.get_text_config().dtype or torch.float32
    else:
        config = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        dtype = torch.float32
    lengthen(config.get_text_config(), given.seq_len, given.rope_theta)
    options = {"config": config, "dtype": torch.float32, "attn_implementation": "ringray"}
    if given.model:
        return AutoModelForCausalLM.from_pretrained(given.model, **options), dtype
    torch.manual_seed(0)  # the same weights on every rank
    return AutoModelForCausalLM.from_config(**options), dtype


def lengthen(config: PreTrainedConfig, seq_len: int, theta: float | None) -> None:
    """Fits RoPE to a longer context: its type and factors stay, only the base is another one, and
    that not in the tables of layers with a window, whose distances stay what they were."""
    tables = getattr(config, "rope_parameters", None) or {}
    if not any(isinstance(table, dict) for table in tables.values()):
        tables = {"full_attention": tables} if tables else {}
    seeing_all = [table for name, table in tables.items() if name == "full_attention" and table]
    if theta and not seeing_all:
        raise SystemExit(f"--rope-theta: {config.model_type} has no RoPE of full attention")
    for table in seeing_all:
        table["rope_theta"] = theta or table["rope_theta"]
    # The frequencies of these depend on it.
    of_length = any(
        table["rope_type"] in ("dynamic", "longrope") or table.get("factor", 1) is None
        for table in tables.values()
        if table
    )
    if tables and not of_length:
        config.max_position_embeddings = max(config.max_position_embeddings, seq_len)


def rate(given: argparse.Namespace, step: int) -> float:
    """Returns a step's share of the learning rate: it rises for a tenth of the steps, then falls
    to a tenth along a cosine."""
    rising = max(1, given.steps // 10)
    if step < rising:
        return (step + 1) / rising
    part = (step - rising) / max(1, given.steps - rising)
    return 0.55 + 0.45 * math.cos(math.pi * part)


def export(
    model: PreTrainedModel, dtype: torch.dtype, folder: str, tokenizer: str | None = None
) -> None:
    """Writes a folder that ``from_pretrained`` loads; every rank calls it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # on rank 0
    if dist.get_rank() == 0:
        weights = {
            name: weight.to(dtype) if weight.is_floating_point() else weight
            for name, weight in weights.items()
        }
        model.save_pretrained(folder, state_dict=weights)
        describe(model, dtype, folder)
        if tokenizer:
            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    dist.barrier()


# Apart from torch.distributed: Ray pickles, with a function, modules of the packages that it names
# that are called as its attributes are, and torch.distributed.config cannot be pickled.
def describe(model: PreTrainedModel, dtype: torch.dtype, folder: str) -> None:
    """Writes the config with the dtype of the weights in the folder, not of those in training."""
    for config in (model.config, model.config.get_text_config()):
        config.dtype = dtype
    model.config.save_pretrained(folder)


def train(given: argparse.Namespace) -> None:
    """What each rank runs; the default process group is formed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = ringray.make_mesh(dp=given.dp, device=device)
    corpus = Corpus(given.data, tokenizer=given.model)
    hf.register()
    model, dtype = load(given)
    # Weights, their sums over ranks and AdamW's moments stay in fp32: in bf16 a step of 1e-5 of a
    # weight is rounded to nothing.
    ringray.parallelize(model.to(device), mesh, dtype=dtype)
    most = given.rate or (1e-5 if given.model else 1e-3)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=most, betas=(0.9, 0.95), weight_decay=0.1)

    size = [type(model).__name__.removeprefix("FSDP"), model.num_parameters()]

    def accept(facts: dict[str, Any]) -> None:
        if facts.get("model") != size:
            raise CheckpointError(f"it is of {facts.get('model')}, expected {size}")

    kept = Checkpoints(given.checkpoints) if given.checkpoints else None
    facts = kept.load(model, optimizer, accept) if kept else None
    first, seen = (facts["step"], facts["sequences"]) if facts else (0, 0)

    whole = torch.arange(given.seq_len).numpy()
    for step in range(first, given.steps):
        rows = corpus.rows(seen + mesh.place("dp"), given.seq_len, whole)
        ids = torch.from_numpy(rows.tokens)[None].to(device)
        batch = hf.shard_batch(
            model, ids, labels=ids, cu_seqlens=torch.from_numpy(rows.ends), group=mesh.ring,
            gradients="mean",
        )  # fmt: skip
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = most * rate(given, step)
        optimizer.step()
        optimizer.zero_grad()
        seen += given.dp
        mean = loss.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {mean.item() / dist.get_world_size():.4f}", flush=True)
        if kept and (step + 1 == given.steps or (step + 1) % given.save_every == 0):
            kept.save(step + 1, model, optimizer, {"model": size, "sequences": seen})
    if kept:
        kept.wait()
    if given.export:
        export(model, dtype, given.export, given.model)


if __name__ == "__main__":
    main()
