"""Adapters of existing models: each routes a model's own attention to the ring.

sdpa               code that calls ``scaled_dot_product_attention``
attention_kernels  PyTorch's kernels, which refuse other callers meanwhile
huggingface        Hugging Face models

To add one, write ``ringray/models/<name>.py`` beside the others, on top of ``ring_attention``. It
refuses attention that it cannot route with a ValueError: a model that attends locally by mistake
trains without any error. Adapters are imported on first use.
"""
