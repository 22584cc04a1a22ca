"""Trains a tiny Llama whose sequence is dealt over all ranks of a torchrun, and prints the loss.

pip install 'ringray[hf]'
torchrun --nproc-per-node 2 docs/examples/torchrun_llama.py
"""

import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import ringray.models.huggingface as hf

STEPS, SEQ_LEN, VOCABULARY = 20, 509, 128


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    hf.register()
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQ_LEN,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringray").to(device)
    # DDP gives every rank the weights of the first one, and averages gradients over the ring.
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # Every rank loads the same sequences; shard_batch keeps this rank's rows.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (1, 32), generator=generator).repeat(1, 16)[:, :SEQ_LEN]
    ids = ids.to(device)
    batch = hf.shard_batch(model, ids, labels=ids, gradients="mean")

    for step in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach()
        dist.all_reduce(whole)
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {whole.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
