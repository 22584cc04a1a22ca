"""The kinds of experiment: what one trial does on its ring.

To add one, write ``ringray/kinds/<name>.py`` beside the others and add its name to ``KINDS``.
The modules need torch, so this registry holds their paths: specs and plans are checked against
the names without importing any of them.
"""

KINDS: dict[str, str] = {
    "correctness": "ringray.kinds.correctness",
    "latency": "ringray.kinds.latency",
    "overlap": "ringray.kinds.overlap",
}
