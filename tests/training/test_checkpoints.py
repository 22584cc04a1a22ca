"""Checkpoints that are damaged or another's: nothing in them runs, the one before is loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support import checkpoint_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints that two ranks have written."""
    folder = tmp_path_factory.mktemp("checkpoints") / "kept"
    on_ring(2, [partial(checks.saves, folder)])
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "kept")


def test_nothing_in_a_folder_runs(folder: Path) -> None:
    on_ring(1, [partial(checks.runs_nothing, folder)])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other_key(path: Path) -> None:
    """Still JSON, but no facts that ``accept`` takes."""
    path.write_text(path.read_text().replace('"of"', '"og"'))


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("__1_0.distcp", flip, "__1_0.distcp has other bytes than were written"),
    ("__0_0.distcp", lambda path: os.truncate(path, 1000), "__0_0.distcp has 1,000 bytes, expec"),
    (".metadata", flip, ".metadata"),
    (".metadata", folder_instead, ".metadata has "),
    (".metadata", lambda path: path.unlink(), ""),
    ("facts.json", lambda path: path.unlink(), "facts.json is missing"),
    ("facts.json", other_key, "facts.json has other bytes than were written"),
    ("manifest.json", lambda path: os.truncate(path, 0), "manifest.json: Expecting value"),
    (
        "manifest.json",
        lambda path: path.write_text('{".metadata": null, "facts.json": 5}'),
        "manifest.json does not tell size and digest of .metadata",
    ),
]


@pytest.mark.parametrize("size", [2, *exhaustive(1, 3)])
def test_every_rank_goes_on_from_the_checkpoint_before(size: int, folder: Path) -> None:
    """Whatever number of ranks wrote it."""
    each = []
    for i, (name, damage, says) in enumerate(DAMAGES):
        some = shutil.copytree(folder, folder.with_name(f"kept-{i}"))
        damage(some / "step-00000002" / name)
        each.append(partial(checks.loads, some, 1, says))
    on_ring(size, [*each, partial(checks.loads, folder, 2, "")])


def test_ranks_that_disagree_go_on_from_the_same_step(folder: Path) -> None:
    on_ring(2, [partial(checks.ranks_disagree, folder)])


def test_the_last_whole_checkpoint_stays_until_another_is_written(folder: Path) -> None:
    flip(folder / "step-00000002" / "facts.json")
    on_ring(2, [partial(checks.goes_on_behind_damage, folder)])


@pytest.mark.slow
def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before(folder: Path) -> None:
    with pytest.raises((EOFError, ConnectionResetError)):
        on_ring(2, [partial(checks.dies_while_it_writes, folder)])
    assert [path.name for path in folder.glob("*.part")] == ["step-00000003.part"]
    shutil.copytree(folder / "step-00000002", folder / "step-00000004.part")  # all but named
    on_ring(2, [partial(checks.loads, folder, 2, ""), partial(checks.saves, folder)])
    assert not [*folder.glob("*.part")]


def test_checkpoints_without_a_manifest_are_read(folder: Path) -> None:
    """Those of an earlier ringray; of damage the files themselves must tell."""
    for place in folder.glob("step-*"):
        (place / "manifest.json").unlink()
    on_ring(2, [partial(checks.loads, folder, 2, "")])
    data = folder / "step-00000002" / "__1_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    on_ring(2, [partial(checks.loads, folder, 1, "is damaged: rank ")])
    os.truncate(data, 1000)
    on_ring(2, [partial(checks.loads, folder, 1, "is damaged: rank ")])
    (folder / "step-00000002").rename(folder / "step-7")
    on_ring(1, [partial(checks.loads, folder, 1, "facts.json is not of this step")])


def test_none_that_is_whole_is_told(folder: Path) -> None:
    for place in folder.glob("step-*"):
        flip(place / ".metadata")
    on_ring(2, [partial(checks.is_refused, folder, "there is none before it")])
