"""Fine-tunes a Hugging Face causal model on longer sequences, each dealt over a ring of ranks.

pip install 'ringray[hf]'
torchrun --nproc-per-node 2 docs/examples/finetune.py --data docs --seq-len 2048
torchrun --nproc-per-node 8 docs/examples/finetune.py --model FOLDER --data TEXTS --seq-len 131072
python docs/examples/finetune.py --workers 2 --data docs --seq-len 2048  # by Ray Train

``--model``: folder of a pretrained model with its tokenizer; without it, a tiny Llama of random
weights learns bytes. ``--rope-theta`` larger than the model's own fits it to longer sequences.
Documents are packed; checkpoints go on with another number of ranks.
"""

import argparse
import os
import secrets
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import ringray
import ringray.models.huggingface as hf
from ringray.training.checkpoint import Checkpoints
from ringray.training.corpus import Corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a pretrained model")
    parser.add_argument("--data", nargs="+", required=True, help="files or folders of text")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--dp", type=int, default=1, help="replicas; the other ranks are rings")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--rope-theta", type=float, help="base of RoPE's frequencies")
    parser.add_argument("--checkpoints", help="folder")
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
    for name in ("model", "checkpoints"):  # workers have another working directory
        if path := getattr(given, name):
            setattr(given, name, str(Path(path).resolve()))
    given.data = [str(Path(path).resolve()) for path in given.data]
    scaling = ScalingConfig(num_workers=given.workers, use_gpu=torch.cuda.is_available())
    TorchTrainer(train, train_loop_config=given, scaling_config=scaling).fit()


def train(given: argparse.Namespace) -> None:
    """What each rank runs; the default process group is formed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = ringray.make_mesh(dp=given.dp, device=device)
    corpus = Corpus(given.data, tokenizer=given.model)

    hf.register()
    torch.manual_seed(0)  # the same weights on every rank
    if given.model:
        model = AutoModelForCausalLM.from_pretrained(
            given.model, attn_implementation="ringray", max_position_embeddings=given.seq_len
        )
    else:
        config = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
            max_position_embeddings=given.seq_len,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, attn_implementation="ringray")
    if given.rope_theta:
        rotary = model.model.rotary_emb
        halves = torch.arange(0, 2 * len(rotary.inv_freq), 2) / (2 * len(rotary.inv_freq))
        rotary.inv_freq.copy_(given.rope_theta**-halves)
    ringray.parallelize(model.to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    kept = Checkpoints(given.checkpoints) if given.checkpoints else None
    facts = kept.load(model, optimizer) if kept else None

    whole = torch.arange(given.seq_len).numpy()
    for step in range(facts["step"] if facts else 0, given.steps):
        rows = corpus.rows(step * given.dp + mesh.place("dp"), given.seq_len, whole)
        ids = torch.from_numpy(rows.tokens)[None].to(device)
        batch = hf.shard_batch(
            model, ids, labels=ids, cu_seqlens=torch.from_numpy(rows.ends), group=mesh.ring,
            gradients="mean",
        )  # fmt: skip
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {mean.item() / dist.get_world_size():.4f}", flush=True)
        if kept and (step + 1 == given.steps or (step + 1) % given.save_every == 0):
            kept.save(step + 1, model, optimizer, {})
    if kept:
        kept.wait()


if __name__ == "__main__":
    main()
