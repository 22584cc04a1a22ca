"""Pickles read as data: no name in them is looked up, and nothing is called.

``pickle`` imports and calls what a file names, and may never end with a key of nested tuples. Here
an object is an ``Instance``, for the reader to judge.
"""

from __future__ import annotations

import pickletools
import re
from dataclasses import dataclass
from typing import Any

from ringray.base.errors import reason_of

# The classes and functions of which torch's checkpoints, and tensors in them, are made.
_NAMES = re.compile(
    r"torch(\.distributed\.checkpoint\.(metadata|filesystem))?\.\w+|torch\._utils\._rebuild_\w+|"
    r"torch\.serialization\._get_layout|collections\.OrderedDict|pathlib\.(_local\.)?PosixPath"
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TO_MARK = ("TUPLE", "APPENDS", "SETITEMS")  # take all that lies above the last mark
# Instructions, and how many objects they take from the stack.
_TAKES = dict.fromkeys(("TUPLE1", "APPEND", "BUILD", "BINPERSID"), 1) | {"TUPLE3": 3}
_TAKES |= dict.fromkeys(("TUPLE2", "SETITEM", "STACK_GLOBAL", "NEWOBJ", "REDUCE"), 2)


@dataclass(eq=False, slots=True)
class Instance:
    """An object that a pickle describes: its class or function, arguments and state."""

    name: str
    arguments: Any = None
    state: Any = None


def read(data: bytes) -> Any:
    """Returns what a pickle holds.

    Raises:
        ValueError: it is damaged, or holds other things than checkpoints of torch do.
    """
    try:
        return _run(data)
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"a damaged pickle ({reason_of(error)})") from None


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    value: Any
    for instruction, value, _ in pickletools.genops(data):
        # Each takes objects from the end of the stack, and most put one there.
        name = instruction.name
        start = marks.pop() if name in _TO_MARK else len(stack) - _TAKES.get(name, 0)
        taken = stack[start:]
        del stack[start:]
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                marks.append(len(stack))
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                memo[len(memo) if value is None else value] = stack[-1]
            case "APPEND" | "APPENDS":
                stack[-1].extend(taken)
            case "SETITEM" | "SETITEMS":
                # The hash of nested tuples may take for ever.
                if not all(isinstance(key, str | Instance) for key in taken[::2]):
                    raise ValueError("a key that is neither a text nor an object")
                stack[-1].update(zip(taken[::2], taken[1::2], strict=True))
            case "BUILD":
                [stack[-1].state] = taken
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(taken))
            case "EMPTY_DICT" | "EMPTY_LIST":
                stack.append({} if name == "EMPTY_DICT" else [])
            case "GLOBAL" | "STACK_GLOBAL":
                stack.append(Instance(".".join(taken or value.split(" "))))
                if not _NAMES.fullmatch(stack[-1].name):
                    raise ValueError(f"it names {stack[-1].name[:80]!r}")
            case "NEWOBJ" | "REDUCE":
                stack.append(Instance(taken[0].name, taken[1]))
            case "BINPERSID":
                stack.append(Instance("", taken))
            case _ if name in _CONSTANTS or type(value) in (str, int, float):
                stack.append(_CONSTANTS.get(name, value))
            case _:
                raise ValueError(f"the instruction {name}")
    [result] = stack
    return result
