"""The kinds of experiment: what one trial does on its ring.

To add one, write ``ringray/kinds/<name>.py`` beside the others and add its name to ``KINDS``.
The modules need torch, so this registry holds their paths: specs and plans are checked against
the names without importing any of them. ``SEARCHABLE`` are those whose trials are timed run by run,
so that a search may come back to one.
"""

KINDS: dict[str, str] = {
    "correctness": "ringray.lab.kinds.correctness",
    "latency": "ringray.lab.kinds.latency",
    "overlap": "ringray.lab.kinds.overlap",
    "strategy-tune": "ringray.lab.kinds.latency",
    "kernel-tune": "ringray.lab.kinds.kernel_tune",
}
SEARCHABLE = ("latency", "strategy-tune", "kernel-tune")
# Whose best points are kept as tuned choices, and for what.
TUNING = {"strategy-tune": "strategy", "kernel-tune": "kernel"}
ALONE = ("kernel-tune",)  # whose ranks measure different points side by side, as rings of one
