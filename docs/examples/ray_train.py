"""Trains a tiny Llama with Ray Train, its sequence dealt over all workers, and prints the loss.

pip install 'ringray[hf]'
python docs/examples/ray_train.py

It starts a Ray of its own and ends it again. On GPUs there is a worker for each and they talk
through NCCL; otherwise two workers share the CPU and talk through gloo.
"""

import os
import secrets

# Before Ray is imported: nobody else may use the one that this starts.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import ringray.models.huggingface as hf

STEPS, SEQ_LEN, VOCABULARY = 20, 509, 128


def train() -> None:
    """What each worker runs; Ray Train has formed their process group."""
    torch.manual_seed(0)
    hf.register()
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQ_LEN,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringray")
    # Moves it to the worker's device and wraps it in DDP, which averages gradients over the ring.
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # Every worker loads the same sequences; shard_batch keeps this worker's rows.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (1, 32), generator=generator).repeat(1, 16)[:, :SEQ_LEN]
    ids = ids.to(ray.train.torch.get_device())
    batch = hf.shard_batch(model, ids, labels=ids, gradients="mean")

    for step in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach()
        dist.all_reduce(whole)
        whole /= dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {whole.item():.4f}", flush=True)
    ray.train.report({"loss": whole.item()})


def main() -> None:
    gpus = torch.cuda.device_count()
    workers = gpus or 2
    ray.init(address="local", num_cpus=workers, include_dashboard=False)
    try:
        trainer = ray.train.torch.TorchTrainer(
            train,
            scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=gpus > 0),
            torch_config=ray.train.torch.TorchConfig(backend="nccl" if gpus else "gloo"),
        )
        trainer.fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
