"""Verifications whose processes are kept from one target to the next: they take seconds to import
PyTorch and transformers."""

from __future__ import annotations

import atexit
import sys
from typing import Any, ClassVar

import pytest

import ringray
from ringray import verification
from ringray.verification import Verdict, process, world
from ringray.verification.target import load
from ringray.verification.world import ALONE, Refused, World, _Child

_LIMIT = 1200.0  # seconds: longer than a busy machine takes


class ManyProcess(process.Process):
    """A process that verifies one target after another."""

    def become(self, text: str, adapter: str | None) -> dict[str, Any]:
        """Builds the model of another target."""
        if "accelerate" in sys.modules:  # it keeps the first configuration of a process
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        self.target, self.exact = load(text, adapter), None
        return self.build()


def main() -> None:
    """Runs a process of a verification; ``_MAIN`` of ``KeptWorld``."""
    process.Process = ManyProcess  # type: ignore[misc]
    process.main()


class KeptWorld(World):
    """The processes of one target, and then of another."""

    kept: ClassVar[dict[int, dict[int, _Child]]] = {}  # by the number of ranks
    folders: ClassVar[list[Any]] = []

    def __enter__(self) -> World:
        children = self.kept.pop(self.ranks, None)
        if children is None:
            self.folders.append(self._folder)
            return super().__enter__()
        self._children, asked = children, [ALONE, *range(self.ranks)]
        request = "become", {"text": self.target, "adapter": self.adapter}
        try:
            facts = dict(zip(asked, self._answers(asked, request), strict=True))
        except Refused as error:
            self._fail(str(error))
        self.facts = facts[ALONE]
        self._check_weights(facts)
        return self

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if len(self._children) == 1 + self.ranks:
            self.kept[self.ranks] = self._children
        else:  # an error ended them
            self._end()


@atexit.register
def end() -> None:
    """Ends all processes that are kept."""
    for children in KeptWorld.kept.values():
        for child in children.values():
            child.process.kill()
            child.process.wait()


def verified(text: str, adapter: str | None = None, **options: Any) -> Verdict:
    """Returns the verdict of ``ringray.verify``; ``text``: as ``module:function``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "_MAIN", "from tests.support.verification import main; main()")
        patch.setattr(verification, "World", KeptWorld)
        return ringray.verify(text, adapter=adapter, limit=_LIMIT, **options)
