"""Faults that no test can send from outside: code that one rank of a real ring runs in mid-trial.

A folder with a ``sitecustomize`` goes before ``ringray`` on the path of every process of a place;
in ranks it puts the fault around one function of ringray, as soon as that is imported.
"""

from __future__ import annotations

from tests.support.place import Place

CUSTOMIZE = """\
import os, sys

TARGET, FUNCTION = {module!r}, {function!r}
FLAG = {flag!r}


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        import importlib.util
        spec = importlib.util.find_spec(name)
        whole = spec.loader.exec_module

        def exec_module(module):
            whole(module)
            was = getattr(module, FUNCTION)

            def around(*given, **named):
                import torch.distributed as dist
                rank = dist.get_rank() if dist.is_initialized() else 0
                if rank == {rank} and os.path.exists(FLAG):
                    os.unlink(FLAG)
                    fail()
                return was(*given, **named)

            setattr(module, FUNCTION, around)

        spec.loader.exec_module = exec_module
        return spec


def fail():
{body}


sys.meta_path.insert(0, Finder())
"""

# A real refusal of PyTorch's allocator, inside of a pass, where the others wait in a hop.
NO_MEMORY = "    import torch\n    torch.empty(1 << 50, dtype=torch.uint8)"
# A real error of a compiler: shapes that do not go together, found while it traces.
NO_SHAPE = """\
    import torch
    torch.compile(lambda x: x @ x, fullgraph=True, backend="eager")(torch.ones(2, 3))"""
# A process that ends by itself, with a last word.
CRASH = """\
    print("that was not to be", file=sys.stderr, flush=True)
    os._exit(7)"""
NO_END = "    import time\n    time.sleep(3600)"


def prepare(place: Place, body: str, rank: int = 1) -> None:
    """From the next command on, ``rank`` fails with ``body`` once for each :func:`strike`."""
    folder = place.home / "sabotage"
    folder.mkdir()
    text = CUSTOMIZE.format(
        module="ringray.attention.loops.ring", function="_attend",
        flag=str(folder / "now"), rank=rank, body=body,
    )  # fmt: skip
    (folder / "sitecustomize.py").write_text(text)
    place.variables["PYTHONPATH"] = f"{folder}:{place.environment['PYTHONPATH']}"


def strike(place: Place) -> None:
    """The next attention that the rank computes fails."""
    (place.home / "sabotage" / "now").touch()
