"""Adapters: ways to run a plain model on several ranks, one file each.

A file has a class whose methods and constants are those of a target
(``ringray.verification.target``) that differ from the defaults; an instance may remember what it
learns of the model and the batch. What follows the name of an adapter (``ring:striped,hybrid:2``)
are the arguments of its class. To add one, write it and name it in ``target.ADAPTERS``; the
contract suite runs over all.

ring                    our ring
parallelize             our ring with FSDP2: ``ringray.parallelize``
torch_context_parallel  PyTorch's ``context_parallel``
torch_flex              PyTorch's FlexAttention on shards
accelerate              Accelerate's ``ParallelismConfig(cp_size=)``
ulysses                 Ulysses of DeepSpeed, as Accelerate and transformers start it
ddp, fsdp               whole rows on each rank
"""
