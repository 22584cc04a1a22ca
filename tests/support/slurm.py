"""A stand-in of Slurm on this machine: `sbatch` is `bash`, `srun` starts each task as a process.

    python -m tests.support.slurm srun --nodes=2 ... COMMAND      on the nodes of STAND_IN_NODES

Nodes are addresses; one written ``namespace/address`` is a namespace of ``cluster.network``.
Standard input goes to all tasks, as from the real `srun`; a task that ends ends no other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.place import REPOSITORY, Place

SCRIPT = REPOSITORY / "cluster" / "slurm.sh"
NODES = "STAND_IN_NODES"
CONTAINED = "contained"  # file in the place: the commands that CONTAINER ran
STARTED = "started"  # file in the place: the arguments of each start of a node of Ray
CONTAINER = "container exec"  # a stand-in of `apptainer exec`
PYTHON = """\
#!/bin/sh
case "$*" in *ray.scripts.scripts*) echo "$*" >> "$RINGRAY_HOME/{log}";; esac
exec {python} "$@"
"""


def start(
    place: Place, *arguments: object, nodes: tuple[str, ...], cpus: int = 1, **variables: str
) -> subprocess.Popen[str]:
    """Starts the script as Slurm does: a copy of it, on the first of ``nodes``."""
    commands = place.home / "bin"
    commands.mkdir(exist_ok=True)
    for name in ("srun", "scontrol"):
        (commands / name).write_text(
            f'#!/bin/sh\nexec {sys.executable} -m tests.support.slurm {name} "$@"\n'
        )
        (commands / name).chmod(0o755)
    (commands / "container").write_text(
        f'#!/bin/sh\nshift\necho "$*" >> "$RINGRAY_HOME/{CONTAINED}"\nexec "$@"\n'
    )
    (commands / "container").chmod(0o755)
    (commands / "python").write_text(PYTHON.format(log=STARTED, python=sys.executable))
    (commands / "python").chmod(0o755)
    spooled = commands / "slurm_script"
    spooled.write_text(SCRIPT.read_text())
    environment = place.environment | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": job(place), "SLURM_JOB_NODELIST": f"node[1-{len(nodes)}]",
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_JOB_CPUS_PER_NODE": f"{cpus}(x{len(nodes)})", "SLURM_CPUS_ON_NODE": str(cpus),
        NODES: " ".join(nodes), **variables,
    }  # fmt: skip
    process = subprocess.Popen(
        ["bash", str(spooled), *map(str, arguments)], text=True, cwd=place.home, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    place.started.append(process)
    return process


def job(place: Place) -> str:
    """Returns the number of the place's job, which no other place has."""
    return str(place.home.stat().st_ino)


def check_nothing_is_left(place: Place) -> None:
    """Fails if a process or a folder of a node outlives its job."""
    place.check_nothing_is_left()
    assert not list(Path("/tmp").glob(f"rr-{job(place)}-*"))


def task(command: list[str], rank: int, node: str) -> subprocess.Popen[bytes]:
    """Starts the task of a node."""
    namespace, _, _ = node.rpartition("/")
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    name = f"node{rank + 1}"
    own = {
        "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURMD_NODENAME": name,
        "SLURM_TOPOLOGY_ADDR": f"spine.leaf{rank}.{name}",
    }  # fmt: skip
    return subprocess.Popen([*inside, *command], stdin=subprocess.PIPE, env=os.environ | own)


def srun(arguments: list[str]) -> int:
    """Runs a command on every node; returns the highest exit code."""
    given = [one for one in arguments if one.startswith("--")]
    nodes = os.environ[NODES].split()
    assert f"--nodes={len(nodes)}" in given, given
    tasks = [task(arguments[len(given) :], rank, node) for rank, node in enumerate(nodes)]
    while block := os.read(0, 4096):
        for one in tasks:
            with suppress(BrokenPipeError):
                os.write(one.stdin.fileno(), block)
    for one in tasks:
        os.close(one.stdin.fileno())
    return max(one.wait() for one in tasks)


def main(program: str, *arguments: str) -> int:
    """Runs one of Slurm's commands."""
    if program == "srun":
        return srun(list(arguments))
    assert arguments[:2] == ("show", "hostnames"), arguments
    print(*(node.rpartition("/")[2] for node in os.environ[NODES].split()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
