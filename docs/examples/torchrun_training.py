"""Trains a tiny decoder on packed documents, its sequence sharded over all ranks.

torchrun --nproc-per-node 2 docs/examples/torchrun_training.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringray
from ringray.nn import next_token_labels

VOCABULARY, HIDDEN, SEQ_LEN = 64, 64, 500


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.attention = ringray.ContextParallelAttention(HIDDEN, num_heads=4, num_kv_heads=2)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 128), nn.SiLU(), nn.Linear(128, HIDDEN))

    def forward(self, x, **where):
        x = x + self.attention(self.norms[0](x), **where)
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, **where):  # (B, S) of this rank -> logits (B, S, V)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, **where)
        return self.head(x)


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights and, below, the same text on every rank
model = DistributedDataParallel(Decoder())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(20):
    # Documents that count up from anywhere, packed into one row; 500 is no multiple of 2 x ranks.
    cu_seqlens = torch.tensor([0, *sorted(torch.randint(1, SEQ_LEN, (6,)).tolist()), SEQ_LEN])
    starts = torch.randint(VOCABULARY, (7,)).repeat_interleave(cu_seqlens.diff())
    ids = ((starts + torch.arange(SEQ_LEN)) % VOCABULARY)[None]
    # Shifted before sharding; rows of padding have no label.
    labels = ringray.shard(next_token_labels(ids, cu_seqlens), dim=1, pad_value=-100)
    logits = model(ringray.shard(ids, dim=1), seq_len=SEQ_LEN, cu_seqlens=cu_seqlens)
    loss = ringray.sharded_cross_entropy(logits, labels, gradients="mean")  # as DDP averages
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
