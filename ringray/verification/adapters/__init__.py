"""Adapters: ways to run a plain model on several ranks, a file for each way to deal a batch.

An adapter is a class whose methods and constants are those of a target
(``ringray.verification.target``) that differ from the defaults; an instance may remember what it
learns of the model and the batch. What follows the name of an adapter (``ring:striped,hybrid:2``)
are the arguments of its class; ``PACKAGE`` is what has to be installed for it. To add one, write it
and name it in ``target.ADAPTERS``; the contract suite runs over all.

ring                    our ring, alone and with FSDP2 (``ringray.parallelize``)
torch_context_parallel  PyTorch's ``context_parallel``, alone and as Accelerate calls it
torch_flex              PyTorch's FlexAttention on shards
ulysses                 Ulysses of DeepSpeed, as Accelerate and transformers start it
data_parallel           DDP and FSDP2: whole rows on each rank
shared                  what several of them need
"""
