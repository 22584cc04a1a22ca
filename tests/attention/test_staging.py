"""Copies of staged messages: on the tensors' device and in order, by streams that stand in for a
GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringray.comm import host_staging
from ringray.comm.batch import Batch
from ringray.instruments.timeline import Timeline
from ringray_kernels.intervals import capturing

OTHER = torch.device("cuda", 1)  # not the current one


class Streams:
    """Events on the streams of the current device, 0, and others; ``log`` in order."""

    def __init__(self) -> None:
        self.current, self.log = "main of cuda:0", list[str]()

    def main(self, device: torch.device | None = None) -> Any:
        return self.stream(f"main of {device or 'cuda:0'}")

    def copies(self, device: torch.device, priority: int) -> Any:
        return self.stream(f"copies of {device}")

    def stream(self, name: str) -> Any:
        def record_event() -> Any:
            self.log.append(f"{name} records")
            return SimpleNamespace(
                name=name, wait=lambda: self.log.append(f"{self.current} waits for {name}")
            )

        return SimpleNamespace(
            name=name,
            record_event=record_event,
            synchronize=lambda: self.log.append("synchronise"),
            wait_event=lambda event: self.log.append(f"{name} waits for {event.name}"),
        )

    def entered(self, stream: Any) -> Any:
        streams = self

        class Context:  # that is entered more than once
            def __enter__(self) -> None:
                self.before, streams.current = streams.current, stream.name

            def __exit__(self, *_: object) -> None:
                streams.current = self.before

        return Context()

    def moves(self, name: str) -> Any:
        return lambda *_, **__: self.log.append(f"{name} on {self.current}")


def test_copies_follow_the_streams_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", streams.main)
    monkeypatch.setattr(torch.cuda, "Stream", streams.copies)
    monkeypatch.setattr(torch.cuda, "stream", streams.entered)
    for name in ("_to_host", "_to_device"):
        monkeypatch.setattr(host_staging, name, streams.moves(name[1:]))
    host_staging._copies.cache_clear()
    tensor: Any = SimpleNamespace(device=OTHER, nbytes=4)
    host_staging.post(Batch("hop", "x", [(True, tensor, 1)]), lambda batch: [])._join()
    host_staging._copies.cache_clear()
    assert streams.log == [
        "main of cuda:1 records", "copies of cuda:1 waits for main of cuda:1",
        "to_host on copies of cuda:1", "synchronise", "to_device on copies of cuda:1",
        "copies of cuda:1 records", "main of cuda:1 waits for copies of cuda:1",
    ]  # fmt: skip


def test_messages_of_a_cpu_leave_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream, even of None, makes a context in every rank."""
    for name in ("stream", "current_stream", "current_device", "Stream"):
        monkeypatch.delattr(torch.cuda, name)
    came, batch = torch.zeros(3), Batch("hop", "x")
    batch.receive(came, 1)

    def start(hosted: Batch) -> list[Any]:
        hosted.operations[0][1].fill_(7.0)
        return []

    host_staging.post(batch, start)._join()
    assert came.tolist() == [7.0] * 3


def test_moments_and_captures_are_those_of_the_tensors_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [torch.device("cuda", 0)]

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device
        yield
        current[0] = before

    asked = list[object]()
    event = SimpleNamespace(record=asked.append)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current == [OTHER])
    Timeline(OTHER)
    assert asked == [OTHER]
    assert capturing(OTHER)
    assert not capturing(torch.device("cuda", 0))
    assert not capturing(torch.device("cpu"))
