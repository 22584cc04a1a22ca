"""The audit finds what is known, accepts only what has a reason, and never passes unasked."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests import audit

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = {"one": "1.5", "two": "2.0"}


def advisory(folder: Path, name: str = "PYSEC-1", **other: Any) -> None:
    given = {
        "id": name, "aliases": [f"CVE-{name}"], "modified": "2026-01-02T00:00:00Z",
        "summary": "bad",
        "affected": [{"package": {"ecosystem": "PyPI", "name": "One"},
                      "ranges": [{"type": "ECOSYSTEM",
                                  "events": [{"introduced": "1.0"}, {"fixed": "1.6"}]}]}],
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(given | other))


@pytest.mark.parametrize(
    ("events", "affected"),
    [
        ([{"introduced": "0"}], True),
        ([{"introduced": "0"}, {"fixed": "1.5"}], False),
        ([{"introduced": "0"}, {"fixed": "1.5.1"}], True),
        ([{"introduced": "1.5.1"}], False),
        ([{"introduced": "0"}, {"last_affected": "1.5"}], True),
        ([{"introduced": "0"}, {"last_affected": "1.4"}], False),
        ([{"introduced": "0"}, {"fixed": "1.2"}, {"introduced": "1.4"}, {"fixed": "1.10"}], True),
        ([{"fixed": "1.2"}, {"introduced": "0"}], False),
        ([{"introduced": "what"}], True),
    ],
)
def test_ranges_of_versions(events: list[dict[str, str]], affected: bool, tmp_path: Path) -> None:
    package = {"ecosystem": "PyPI", "name": "One"}
    entry = {"package": package, "ranges": [{"type": "ECOSYSTEM", "events": events}]}
    advisory(tmp_path, affected=[entry])
    found, said = audit.look_up(PACKAGES, tmp_path)
    assert bool(found) == affected
    assert said == "1 advisories, the youngest of 2026-01-02T00:00:00Z"


def test_what_is_listed_withdrawn_or_of_others(tmp_path: Path) -> None:
    listed = {"package": {"ecosystem": "PyPI", "name": "two"}, "versions": ["2.0"]}
    advisory(tmp_path, "PYSEC-2", affected=[listed])
    advisory(tmp_path, "PYSEC-3", withdrawn="2026-01-03T00:00:00Z")
    advisory(tmp_path, "GO-1", affected=[{"package": {"ecosystem": "Go", "name": "one"}}])
    (tmp_path / "PYSEC-4.yaml").write_text(
        "id: PYSEC-4\naffected:\n- package: {ecosystem: PyPI, name: two}\n  versions: ['1.9']\n"
    )
    found, _ = audit.look_up(PACKAGES, tmp_path)
    assert [one.names[0] for one in found] == ["PYSEC-2"]


def test_what_is_accepted_is_told_with_its_reason(tmp_path: Path) -> None:
    advisory(tmp_path)
    found, _ = audit.look_up(PACKAGES, tmp_path)
    code, lines = audit.report(found, {})
    assert code == 1
    assert lines[0] == "FOUND: one 1.5: PYSEC-1, fixed in 1.6: bad"
    code, lines = audit.report(found, {"CVE-PYSEC-1": "we do not call it", "CVE-9": "gone"})
    assert code == 0
    assert lines[0].startswith("accepted: one 1.5")
    assert lines[0].endswith("(we do not call it)")
    assert "no longer found, take it out: CVE-9" in lines


def test_a_service_that_skips_packages_has_not_audited_them() -> None:
    skipped = {"name": "one", "skip_reason": "Dependency not found on PyPI"}
    whole = {"name": "two", "version": "2.0", "vulns": []}
    with pytest.raises(audit.NotAudited, match="1 of 2 packages were not looked up"):
        audit.read_answer({"dependencies": [skipped, whole]}, PACKAGES)
    bad = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["1.6"], "description": "a\nb"}
    answer = {"dependencies": [{"name": "One", "version": "1.5", "vulns": [bad]}, whole]}
    (found,) = audit.read_answer(answer, PACKAGES)
    assert str(found) == "one 1.5: PYSEC-1, fixed in 1.6: a b"


def test_without_a_service_it_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "pypi" in command:  # as pip-audit does when it reaches nobody
            names = audit.installed()
            told = [{"name": name, "skip_reason": "not found on PyPI"} for name in names]
            return subprocess.CompletedProcess(command, 0, json.dumps({"dependencies": told}), "")
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nConnectionError: no name")

    monkeypatch.setattr(audit.subprocess, "run", unreachable)
    assert audit.main([]) == 2
    said = capsys.readouterr().err
    assert "NOT DONE" in said
    assert "osv: ConnectionError: no name" in said


def test_folders_without_advisories(tmp_path: Path) -> None:
    assert audit.main(["--advisories", str(tmp_path)]) == 2
    (tmp_path / "x.json").write_text("{")
    assert audit.main(["--advisories", str(tmp_path)]) == 2


def test_this_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    advisory(tmp_path)
    assert audit.main(["--advisories", str(tmp_path)]) == 0
    assert f"{len(audit.installed())} packages against 1 advisories" in capsys.readouterr().out
    assert {"ray", "mlflow", "pydantic", "torch"} <= set(audit.installed())
    assert audit.OWN not in audit.installed()
    entry = {"package": {"ecosystem": "PyPI", "name": "ray"}, "ranges": [
        {"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]}  # fmt: skip
    advisory(tmp_path, "PYSEC-RAY", affected=[entry])
    assert audit.main(["--advisories", str(tmp_path)]) == 1
