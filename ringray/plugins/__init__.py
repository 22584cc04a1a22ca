"""Plug-ins: a ring in training programs of others, by one argument. Each file imports the package
that it is for, which ringray itself does not need.

trainer     ``RingCallback``: transformers' ``Trainer`` and TRL's ``SFTTrainer``
accelerate  context parallelism of Accelerate
torchtitan  context parallelism of torchtitan
"""
