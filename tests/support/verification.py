"""Verifications whose processes are kept from one target to the next: they take seconds to import
PyTorch and transformers."""

from __future__ import annotations

import atexit
from typing import Any, ClassVar

import pytest

import ringray
from ringray import verification
from ringray.verification import Verdict
from ringray.verification.world import ALONE, World

_LIMIT = 1200.0  # seconds: longer than a busy machine takes


class KeptWorld(World):
    """The processes of one target, and then of another."""

    running: ClassVar[dict[int, World]] = {}  # by the number of ranks

    def __enter__(self) -> World:
        before = self.running.pop(self.ranks, None)
        if before is None:
            return super().__enter__()
        self._children, self._store = before._children, before._store
        asked = [ALONE, *range(self.ranks)]
        target = {"text": self.target, "adapter": self.adapter}
        self._first(asked, "import_target", _LIMIT, **target)
        built = self._first(asked, "build", _LIMIT)
        self.facts = built[0]
        self._check_weights(dict(zip(asked, built, strict=True)))
        return self

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if kind is None and len(self._children) == 1 + self.ranks:
            self.running[self.ranks] = self
        else:
            super().__exit__(kind, error, tb)


@atexit.register
def end() -> None:
    """Ends all processes that are kept."""
    for world in KeptWorld.running.values():
        World.__exit__(world, None, None, None)


def verified(text: str, adapter: str | None = None, **options: Any) -> Verdict:
    """Returns the verdict of ``ringray.verify``; ``text``: as ``module:function``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "World", KeptWorld)
        return ringray.verify(text, adapter=adapter, limit=_LIMIT, **options)
