"""Plain Ray actors form a ring and attend over one sequence; no driver of ringray is involved.

python docs/examples/ray_actors.py
"""

import os
import secrets

# Before Ray is imported: nobody else may use the one that this starts.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
import torch
import torch.distributed as dist

import ringray

RANKS, SEQ_LEN = 2, 1000


@ray.remote
class Rank:
    def address(self):
        """Where rank 0 holds the ring's store: an open port of this actor's own."""
        self.store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return ray.util.get_node_ip_address(), self.store.port

    def join(self, rank, address):
        store = dist.TCPStore(*address)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)

    def attend(self):
        """Relative error of this rank's rows against SDPA over the whole sequence."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)  # the same tensors on every rank, for the sake of the example
        q, k, v = (torch.randn(1, 4, SEQ_LEN, 32, device=device) for _ in range(3))
        mine = [ringray.shard(x, dim=2).requires_grad_() for x in (q, k, v)]
        out = ringray.ring_attention(*mine, seq_len=SEQ_LEN)
        out.sum().backward()
        whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        want = ringray.shard(whole, dim=2)
        return ((out - want).norm() / want.norm()).item()


# On a cluster: ray.init(address="auto"), Rank.options(num_gpus=1), one placement group around all.
ray.init(address="local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
ranks = [Rank.remote() for _ in range(RANKS)]
address = ray.get(ranks[0].address.remote())
ray.get([actor.join.remote(rank, address) for rank, actor in enumerate(ranks)])
for rank, error in enumerate(ray.get([actor.attend.remote() for actor in ranks])):
    print(f"rank {rank}: {error:.1e} from SDPA over all {SEQ_LEN} tokens")
ray.shutdown()
