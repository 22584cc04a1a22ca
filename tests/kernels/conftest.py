"""One thread, and a quicker interpreter."""

from tests.support.interpreter import one_thread

__all__ = ["one_thread"]
