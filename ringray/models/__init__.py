"""Models on a ring: one of our own, and adapters of existing ones.

layers             of decoders, as groups that are alike: parameters and FLOPs
config_json        reads them from a file of Hugging Face
sizes              of decoders by name
decoder            ``Decoder``, Llama-style, from ringray.nn
sdpa               code that calls ``scaled_dot_product_attention``
trial              of a model, which finds layers that mix tokens without the ring
attention_kernels  PyTorch's kernels, which refuse other callers meanwhile
huggingface        Hugging Face models

To add an adapter, write ``ringray/models/<name>.py`` beside the others, on top of
``ring_attention``. It refuses attention that it cannot route with a ValueError: a model that
attends locally by mistake trains without any error. Models are imported on first use.
"""
