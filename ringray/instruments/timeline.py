"""Timeline of a rank: computation, transfers and waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ringray.instruments.hops import Span

Moment = float | torch.cuda.Event


class Timeline:
    """Spans of one rank. On CUDA moments are events of its current stream, so that only ``spans``
    waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: list[tuple[str, str, str, Moment, Moment, int, int]] = []
        self._origin: Any = self.begin()

    def begin(self) -> Moment:
        """Returns the present moment."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end(
        self, kind: str, hop: str, label: str, began: Moment, sent: int = 0, received: int = 0
    ) -> None:
        """Records a span from ``began`` until now; the other arguments are those of ``Span``."""
        self._recorded.append((kind, hop, label, began, self.begin(), sent, received))

    @contextmanager
    def span(self, kind: str, hop: str, label: str) -> Iterator[None]:
        """Records the block as a span."""
        began = self.begin()
        yield
        self.end(kind, hop, label, began)

    def spans(self) -> list[Span]:
        """Returns all spans in the order in which they ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [
            Span(kind, hop, label, self._since(began), self._since(ended), sent, received)
            for kind, hop, label, began, ended, sent, received in self._recorded
        ]

    def _since(self, moment: Any) -> float:
        if self._device.type != "cuda":
            return float(moment - self._origin)
        return float(self._origin.elapsed_time(moment)) / 1e3
