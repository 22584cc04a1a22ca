"""Pictures of partitions, intervals and walks, drawn from the tables that the ring executes.

Colours are classes of docs/assets/site.css, so that they follow light and dark. A walk is a table
of ranks and steps, which needs no motion; beside it chunks move around a ring, unless the reader's
system asks for less motion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import NamedTuple

from ringray import partition, transport
from ringray.traffic import geometry, script, walk
from ringray.traffic.areas import areas
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask
from ringray.transport import Exchange

_RANKS = 4
_CELL = 16
_HEADS = 8
_STEP_S = 2.0


def partitions() -> str:
    """Draws the owner of each position, and what each rank computes of a causal mask."""
    length = 32
    rows = []
    for number, name in enumerate(partition.PARTITIONS):
        layout, top = Layout(name, length, _RANKS), number * 34 + 18
        visible = geometry.pairs(layout, Mask(length)).visible.sum(1)
        rows.append(_text(0, top + 12, name))
        for rank in range(_RANKS):
            rows += [
                _cell(110 + at * _CELL, top, rank, f"position {at}: rank {rank}")
                for at in _positions(layout, rank)
            ]
            left = 110 + length * _CELL + 12 + rank * 40
            share = visible[rank] / visible.sum()
            rows.append(_text(left, top + 12, f"{share:.0%}", f"ink{rank}"))
    head = _text(110, 10, f"{length} positions; the colour is the rank that holds one")
    head += _text(122 + length * _CELL, 10, "causal work of ranks 0 to 3")
    title = "Positions of each rank in every partition"
    return _svg(122 + length * _CELL + 190, 18 + 34 * len(partition.PARTITIONS), title, head, *rows)


def intervals() -> str:
    """Draws the keys of rank 2 that each query row of rank 1 sees, under several masks."""
    length, asks, owner = 48, 1, 2
    masks = {
        "full": Mask(length, causal=False),
        "causal": Mask(length),
        "window of 12": Mask(length, window=12),
        "documents": Mask(length, documents=(0, 17, 40, length)),
        "chunks of 16": Mask(length, chunk=16),
        "prefix of 30": Mask(length, prefix=(30,)),
    }
    drawn = []
    for down, name in enumerate(("contiguous", "zigzag", "striped")):
        layout = Layout(name, length, _RANKS)
        rows, keys = (_positions(layout, rank) for rank in (asks, owner))
        drawn.append(_text(0, 40 + down * 122 + 50, name))
        for along, (title, mask) in enumerate(masks.items()):
            left, top = 90 + along * 122, 40 + down * 122
            if not down:
                drawn.append(_text(left, 30, title))
            drawn.append(f'<rect class="frame" x="{left}" y="{top}" width="108" height="108"/>')
            for row, query in enumerate(rows):
                seen = [at for at, key in enumerate(keys) if _sees(mask, query, key)]
                if seen:
                    assert seen == list(range(seen[0], seen[-1] + 1)), "no interval"
                    said = f"position {query} sees rows {seen[0]} to {seen[-1]}"
                    drawn.append(
                        f'<rect class="rank{owner}" x="{left + seen[0] * 9}" y="{top + row * 9}" '
                        f'width="{len(seen) * 9}" height="8"><title>{said}</title></rect>'
                    )
    head = _text(0, 10, f"down: the 12 query rows of rank {asks}; along: the keys of rank {owner}")
    return _svg(830, 40 + 3 * 122, "Keys that each query row sees", head, *drawn)


def walks(*names: str) -> str:
    """Draws the forward walks of transports with a causal mask."""
    return "\n\n".join(map(_walk, names))


def _walk(name: str) -> str:
    moving = _forward(transport.plan(name, _RANKS, _HEADS, _HEADS))
    title = f"Walk of transport {name} on {_RANKS} ranks"
    width, ring = 410 + 70 * moving.steps, _ring(moving) if moving.messages else ""
    height = 190 if ring else 50 + 34 * moving.ranks
    return (
        f'<figure class="walk" markdown="0">{_raw(width, height, title, _table(moving), ring)}'
        f"<figcaption><code>{name}</code>: {moving.said}.</figcaption></figure>"
    )


class Moving(NamedTuple):
    """A walk: chunks that each rank computes with, ``[rank][step]``, and messages between them."""

    cells: list[list[list[script.Visit]]]
    messages: list[tuple[int, int, int, int, int]]  # posted, due, owner, sender, receiver
    fold: int
    said: str

    @property
    def ranks(self) -> int:
        """Returns the ranks of the ring in which chunks walk."""
        return len(self.cells)

    @property
    def steps(self) -> int:
        """Returns the number of steps."""
        return max(map(len, self.cells))


def _forward(exchange: Exchange) -> Moving:
    length, ranks = 64, _RANKS // exchange.fold
    layout = Layout("zigzag", length, ranks, exchange.fold)
    costs = walk.costs(2, 1, _HEADS, _HEADS, 64)
    moved = walk.choose(layout, Mask(length), exchange.routes, "planned", costs).forward
    scripts = [script.write(moved, "forward", layout.rows, rank) for rank in range(ranks)]
    messages = [
        (posted, message.due, message.owner, rank, message.peer)
        for rank, one in enumerate(scripts)
        for posted, step in enumerate(one.steps)
        for message in step.messages
        if message.send
    ]
    cells = [
        [[visit for visit in step.visits if visit.need] for step in one.steps] for one in scripts
    ]
    rows, full = moved.sent("forward").chunk_rows, length * (ranks - 1)
    said = (
        f"route “{moved.route.name}”, {len(messages)} messages with {rows} rows; "
        f"all rows to all ranks would be {full}"
    )
    if exchange.fold > 1:
        walking = said if ranks > 1 else "nothing walks"
        said = f"{exchange.fold} neighbours at a time exchange heads for rows; then {walking}"
    return Moving(cells, messages, exchange.fold, said)


def _table(moving: Moving) -> str:
    """Draws which chunk each rank computes with at each step."""
    drawn = [_text(0, 14, "rank")]
    drawn += [_text(75 + step * 70, 14, f"step {step}") for step in range(moving.steps)]
    wide, period = 64, moving.steps * _STEP_S
    drawn.append(
        f'<rect class="now" x="72" y="0" width="{wide + 4}" height="{30 + 34 * moving.ranks}" '
        f'style="animation: walk-now {period}s steps({moving.steps}) infinite; '
        f'--far: {70 * moving.steps}px"/>'
    )
    for rank, steps in enumerate(moving.cells):
        top, last = 24 + rank * 34, (rank + 1) * moving.fold - 1
        who = f"{rank}" if moving.fold == 1 else f"{rank * moving.fold}–{last}"
        drawn.append(_text(0, top + 18, who, f"ink{rank}"))
        for step, visits in enumerate(steps):
            each = wide / max(1, len(visits))
            for at, visit in enumerate(visits):
                left = 74 + step * 70 + at * each
                said = f"chunk {visit.owner}: {visit.need.size} of its rows"
                drawn.append(
                    f'<rect class="rank{visit.owner}" x="{left:.1f}" y="{top}" rx="3" height="26" '
                    f'width="{each - 2:.1f}"><title>{said}</title></rect>'
                    + _text(left + each / 2 - 5, top + 18, str(visit.owner), "on")
                )
    drawn.append(_text(0, 44 + 34 * moving.ranks, "number and colour: whose chunk"))
    return "".join(drawn)


def _ring(moving: Moving) -> str:
    """Draws messages as dots between the ranks of a circle, each during its own steps."""
    middle, radius, period = (120 + 70 * moving.steps + 70, 95), 66, moving.steps * _STEP_S

    def place(rank: int, out: float = 0) -> tuple[float, float]:
        turn = 2 * math.pi * rank / moving.ranks - math.pi / 2
        return (
            middle[0] + (radius + out) * math.cos(turn),
            middle[1] + (radius + out) * math.sin(turn),
        )

    drawn = [f'<circle class="frame" cx="{middle[0]}" cy="{middle[1]}" r="{radius}"/>']
    for rank in range(moving.ranks):
        x, y = place(rank)
        drawn.append(f'<circle class="rank{rank}" cx="{x:.1f}" cy="{y:.1f}" r="17"/>')
        drawn.append(_text(x - 4, y + 5, str(rank), "on"))
    frames: dict[str, str] = {}
    for posted, due, owner, sender, receiver in moving.messages:
        start, stop = 100 * posted / moving.steps, 100 * (due + 1) / moving.steps
        name = f"hop-{moving.steps}-{posted}-{due}"
        frames[name] = (
            f"@keyframes {name} {{ 0%, {start:.2f}% {{ opacity: 0; transform: none }} "
            f"{start + 0.5:.2f}% {{ opacity: 1; transform: none }} "
            f"{stop - 0.5:.2f}% {{ opacity: 1; transform: translate(var(--x), var(--y)) }} "
            f"{stop:.2f}%, 100% {{ opacity: 0; transform: translate(var(--x), var(--y)) }} }}"
        )
        (x, y), (to_x, to_y) = place(sender), place(receiver)
        drawn.append(
            f'<circle class="chunk rank{owner}" cx="{x:.1f}" cy="{y:.1f}" r="9" style="'
            f"--x: {to_x - x:.1f}px; --y: {to_y - y:.1f}px; "
            f'animation: {name} {period}s linear infinite">'
            f"<title>chunk {owner} from {sender} to {receiver}</title></circle>"
        )
    return f"<style>{' '.join(frames.values())}</style>{''.join(drawn)}"


def _positions(layout: Layout, rank: int) -> list[int]:
    return sorted(position for part in layout.ranges(rank) for position in part)


def _sees(mask: Mask, query: int, key: int) -> bool:
    every = zip(*(column.tolist() for column in areas(mask)), strict=True)
    return any(
        first <= query < stop and start <= key < end and least <= query - key <= most
        for first, stop, start, end, least, most in every
    )


def _cell(x: float, y: float, rank: int, said: str) -> str:
    return (
        f'<rect class="rank{rank}" x="{x}" y="{y}" width="{_CELL - 1}" height="16">'
        f"<title>{said}</title></rect>"
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _raw(width: int, height: int, title: str, *parts: str) -> str:
    return (
        f'<svg class="drawn" viewBox="0 0 {width} {height}" style="max-width: {width}px" '
        f'role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _svg(width: int, height: int, title: str, *parts: str) -> str:
    return f'<figure markdown="0">{_raw(width, height, title, *parts)}</figure>'


PARTS: dict[str, Callable[[], str]] = {
    "partitions": partitions,
    "intervals": intervals,
    "walks": lambda: walks(
        "ring", "bidirectional", "direct", "double-ring:2", "hybrid:2", "allgather", "ulysses"
    ),
}
