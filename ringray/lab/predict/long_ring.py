"""Cost of long rings, from that of shorter ones whose ranks have as many rows.

Tables of a ring grow with the square of its ranks. But each further node of ranks adds as much to a
rank's time as the one before, so two rings of a few nodes say what a longer one takes. Memory, and
bytes where all rows are seen, are exact; times were within 1% of the simulated ones of 512 ranks.
The agreement before a pass grows with the logarithm, which is added.
"""

from __future__ import annotations

from functools import lru_cache

from ringray.lab.predict import cost_model, ring_time
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Fleet
from ringray.lab.trial.config import TrialConfig

_SHORT = 64  # ranks among which chunks walk, at least; the other ring has twice as many
_WINDOWS = 8  # or chunks, so many of which a ring holds at least
_TOTALS = ("flops", "sent_bytes", "messages", "inner_bytes", "outer_bytes")


def shorter(config: TrialConfig, on: Fleet) -> int | None:
    """Returns the ranks of the shorter of both rings, whole nodes; None if the ring is not long."""
    here = max(1, on.per_node // on.stride)  # ranks of the ring on a node
    mask, rows = config.problem.mask, config.padded // config.ring.size
    seen = max(mask.window if isinstance(mask.window, int) else 0, mask.chunk or 0)
    least = max(_SHORT * config.exchange.fold, -(-_WINDOWS * seen // rows), 2 * here)
    ranks = here * -(-least // here)
    return ranks if config.ring.size > 2 * ranks else None


@lru_cache(maxsize=4096)
def predict(config: TrialConfig, on: Fleet) -> Cost:
    """Returns ``cost_model.predict``, of a long ring by two shorter ones.

    Raises:
        ValueError: the transport does not fit the ring and heads, or the walk back is impossible.
    """
    ranks, short = config.ring.size, shorter(config, on)
    if short is None:
        return cost_model.predict(config, on)
    rows, passes = config.padded // ranks, 1 + config.problem.has_backward

    def agreeing_ms(size: int) -> float:
        return 1e3 * passes * ring_time.overhead(on, size)

    def of_rank(size: int) -> tuple[Cost, list[float]]:
        """Returns the cost of a ring, and what grows with its ranks."""
        cost = cost_model.predict(config.changed(ring_size=size, seq_len=size * rows), on)
        times = [ms - agreeing_ms(size) for ms in (cost.time_ms, cost.exposed_ms)]
        totals = [getattr(cost, name) / size for name in _TOTALS]
        return cost, [*times, cost.peak_memory_bytes, *totals]

    (_, less), (cost, more) = of_rank(short), of_rank(2 * short)
    further = ranks / short - 2  # times as many ranks as between both
    ms, exposed, peak, *totals = (b + (b - a) * further for a, b in zip(less, more, strict=True))
    return cost._replace(
        **cost_model.times((ms + agreeing_ms(ranks)) / 1e3, cost.high_ms / cost.time_ms - 1),
        exposed_ms=exposed + agreeing_ms(ranks),
        peak_memory_bytes=round(peak),
        **{name: round(ranks * value) for name, value in zip(_TOTALS, totals, strict=True)},
    )
