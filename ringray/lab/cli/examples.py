"""``examples``: the specs that ringray brings, listed and copied."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ringray.base.errors import UserError, unknown
from ringray.lab.cli.options import Option, Output, options, write
from ringray.lab.cli.outputs import check_file
from ringray.lab.report import tables
from ringray.lab.specs.yaml_source import EXAMPLES


@options(
    Option("name", metavar="NAME", nargs="?", help="the example to copy (default: list all)"),
    Output("-o", "--output", folder=True, metavar="FOLDER", default=".", help="where to (here)"),
    Option("--force", action="store_true", help="overwrite a file of that name"),
)
def examples(arguments: argparse.Namespace) -> int:
    """Lists the examples, or copies one."""
    paths = {path.stem: path for path in sorted(EXAMPLES.glob("*.yaml"))}
    if arguments.name is None:
        table = tables.bare_table("example", "why", texts=("example", "why"))
        for name, path in paths.items():
            table.add_row(name, _first_sentence(path.read_text(encoding="utf-8")))
        tables.show(table, tables.console())
        print("`ringray examples NAME` copies one, `ringray run experiments/NAME.yaml` runs it")
        return 0
    name = arguments.name.removesuffix(".yaml")
    if name not in paths:
        raise UserError(unknown("example", name, paths))
    target = Path(arguments.output) / paths[name].name
    check_file("--output", str(target), arguments, new=True)
    write("--output", str(target), paths[name].read_text(encoding="utf-8"))
    shows = f"`ringray plan {target}` shows what it measures"
    print(f"{target}: {shows}, `ringray run {target}` does it")
    return 0


def _first_sentence(text: str) -> str:
    """Returns the first sentence of the comment with which a spec begins."""
    lines = [line[1:].strip() for line in text.partition("\nversion:")[0].splitlines()]
    return re.split(r"(?<=[.?!;:]) ", " ".join(lines), maxsplit=1)[0].rstrip(":;")
