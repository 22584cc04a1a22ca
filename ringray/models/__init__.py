"""Adapters of models that people already have: each routes a model's own attention to the ring.

To add one, write ``ringray/models/<name>.py`` beside the others, on top of ``ring_attention``. What
it cannot route it refuses with a ValueError: a model that attends locally by mistake trains, and
nobody notices. Nothing here is imported before it is asked for.
"""
