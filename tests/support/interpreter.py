"""Triton's interpreter, quicker: it patches its language once, not at each call in a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction


def hasten() -> None:
    """Lets calls of functions in a kernel patch the language for the first time only.

    The launch patches what the kernel sees and mends it when it ends; what other modules see stays
    patched. The interpreter searches all of the language again for each call of each tile, which
    takes a third of the time of small tiles.
    """
    patched = set()

    def call(self: InterpretedFunction[Any], *arguments: Any, **options: Any) -> Any:
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        try:
            return self.rewrite()(*arguments, **options)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    InterpretedFunction.__call__ = call


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Sizes are tiny, and a second thread only waits when the machine is busy."""
    torch.set_num_threads(1)
    hasten()
