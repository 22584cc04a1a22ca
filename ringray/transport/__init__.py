"""The transports: how K/V reaches the other ranks of a ring.

To add one, write ``ringray/transport/<name>.py`` beside the others and add its name to
``TRANSPORTS``; the contract suite then runs over it. The modules need torch, so this registry
holds their paths: specs and plans are checked against the names without importing any of them.
"""

TRANSPORTS: dict[str, str] = {
    "ring": "ringray.transport.ring",
}
