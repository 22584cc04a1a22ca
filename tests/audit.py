"""Known vulnerabilities of what is installed: ``make audit``.

    python -m tests.audit                          # asks PyPI, then OSV, through pip-audit
    python -m tests.audit --advisories FOLDER      # reads advisories in OSV's format, offline

Exit code 0: everything was looked up, and nothing was found but what ``[tool.ringray.audit]`` in
pyproject.toml accepts, each with its reason. 1: something was found. 2: not everything could be
looked up; pip-audit by itself calls that "no known vulnerabilities". FOLDER is a checkout of
https://github.com/pypa/advisory-database or OSV's dump for PyPI, unpacked: YAML or JSON files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("pypi", "osv")
OWN = "ringray"
TIMEOUT_S = 900.0


class NotAudited(Exception):
    """Something could not be looked up; says what and why."""


@dataclass(frozen=True)
class Finding:
    """One known vulnerability. ``names``: its id and aliases; ``fixed``: versions without it."""

    package: str
    version: str
    names: tuple[str, ...]
    fixed: tuple[str, ...]
    said: str

    def __str__(self) -> str:
        way_out = f"fixed in {', '.join(self.fixed)}" if self.fixed else "no fixed version"
        return f"{self.package} {self.version}: {self.names[0]}, {way_out}: {self.said}"


def installed() -> dict[str, str]:
    """Versions by name of all that is installed but ringray itself; what follows a ``+`` names a
    build, of which advisories know nothing."""
    found = {}
    for one in metadata.distributions():
        name = canonicalize_name(one.metadata["Name"])
        if name != OWN:
            found[name] = one.version.partition("+")[0]
    return dict(sorted(found.items()))


def accepted() -> dict[str, str]:
    """Reasons by advisory."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(project["tool"]["ringray"]["audit"]["accepted"])


def ask(packages: Mapping[str, str]) -> list[Finding]:
    """Returns the answer of the first service that knows all ``packages``.

    Raises:
        NotAudited: none of them does, or is reached.
    """
    failures = []
    for service in SERVICES:
        try:
            return _ask(service, packages)
        except NotAudited as error:
            failures.append(f"{service}: {error}")
    raise NotAudited("\n".join(failures))


def _ask(service: str, packages: Mapping[str, str]) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "requirements.txt"
        pins.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
        command = [
            sys.executable, "-m", "pip_audit", "--requirement", str(pins), "--no-deps",
            "--disable-pip", "--format", "json", "--vulnerability-service", service,
            "--progress-spinner", "off",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotAudited(f"no answer in {TIMEOUT_S:.0f} s") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise NotAudited(last[0][:300]) from None
    return read_answer(answer, packages)


def read_answer(answer: Any, packages: Mapping[str, str]) -> list[Finding]:
    """The findings in what pip-audit says of ``packages``.

    Raises:
        NotAudited: it skipped or forgot some of them.
    """
    told = {canonicalize_name(one["name"]): one for one in answer["dependencies"]}
    left_out = [name for name in packages if "vulns" not in told.get(name, {})]
    if left_out:
        shown = ", ".join(left_out[:8]) + (", ..." if len(left_out) > 8 else "")
        raise NotAudited(
            f"{len(left_out)} of {len(packages)} packages were not looked up ({shown}): the "
            "service is not reached from here, or does not know them"
        )
    return [
        Finding(
            name, packages[name], (one["id"], *one.get("aliases", ())),
            tuple(one.get("fix_versions", ())), " ".join(one.get("description", "").split())[:200],
        )
        for name in packages
        for one in told[name]["vulns"]
    ]  # fmt: skip


def look_up(packages: Mapping[str, str], folder: Path) -> tuple[list[Finding], str]:
    """Returns the findings of the advisories in ``folder``, and the date of the youngest of them.

    Raises:
        NotAudited: there are none of PyPI.
    """
    found, count, youngest = [], 0, ""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".yaml", ".yml"))
    for path in paths:
        advisory = _advisory(path)
        entries = [] if advisory is None else [*_of_pypi(advisory)]
        if advisory is None or not entries:
            continue
        count += 1
        youngest = max(youngest, str(advisory.get("modified", "")))
        if "withdrawn" in advisory:
            continue
        for affected in entries:
            name = canonicalize_name(affected["package"]["name"])
            if name in packages and _affects(affected, packages[name]):
                found.append(_finding(advisory, affected, name, packages[name]))
    if not count:
        raise NotAudited(f"{folder} holds no advisories of PyPI in OSV's format")
    return found, f"{count:,} advisories, the youngest of {youngest or 'no date'}"


def _advisory(path: Path) -> dict[str, Any] | None:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise NotAudited(f"{path} cannot be read: {error}") from None
    return data if isinstance(data, dict) and "id" in data else None


def _of_pypi(advisory: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for one in advisory.get("affected") or ():
        if one.get("package", {}).get("ecosystem", "").lower() == "pypi":
            yield one


def _affects(affected: Mapping[str, Any], version: str) -> bool:
    """As https://ossf.github.io/osv-schema/ has it: listed, or within a range of versions. What
    cannot be read counts as affected: a person then looks."""
    listed = [str(one) for one in affected.get("versions") or ()]
    if version in listed:
        return True
    ranges = [one for one in affected.get("ranges") or () if one.get("type") == "ECOSYSTEM"]
    if not ranges:
        return not listed
    try:
        return any(_within(one["events"], Version(version)) for one in ranges)
    except (InvalidVersion, KeyError, TypeError):
        return True


def _within(events: Iterable[Mapping[str, Any]], version: Version) -> bool:
    def moment(event: Mapping[str, Any]) -> Version:
        text = str(next(iter(event.values())))
        return Version("0.dev0") if text == "0" else Version(text)

    inside = False
    for event in sorted((one for one in events if "limit" not in one), key=moment):
        if "introduced" in event and version >= moment(event):
            inside = True
        elif ("fixed" in event and version >= moment(event)) or (
            "last_affected" in event and version > moment(event)
        ):
            inside = False
    return inside


def _finding(
    advisory: Mapping[str, Any], affected: Mapping[str, Any], name: str, version: str
) -> Finding:
    fixed = [
        str(event["fixed"])
        for one in affected.get("ranges") or ()
        if one.get("type") == "ECOSYSTEM"
        for event in one.get("events", ())
        if "fixed" in event
    ]
    said = str(advisory.get("summary") or advisory.get("details") or "")
    names = (str(advisory["id"]), *map(str, advisory.get("aliases") or ()))
    return Finding(name, version, names, tuple(fixed), " ".join(said.split())[:200])


def report(found: Iterable[Finding], reasons: Mapping[str, str]) -> tuple[int, list[str]]:
    """The exit code and the lines to print."""
    lines, open_ones, used = [], 0, set()
    for one in found:
        known = [name for name in one.names if name in reasons]
        used.update(known)
        open_ones += not known
        lines.append(f"accepted: {one} ({reasons[known[0]]})" if known else f"FOUND: {one}")
    lines += [f"no longer found, take it out: {name}" for name in reasons if name not in used]
    lines.append(f"{open_ones} known vulnerabilities that are not accepted")
    return (1 if open_ones else 0), lines


def main(arguments: list[str]) -> int:
    """Prints what is known; see the module for the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("--advisories", type=Path, metavar="FOLDER", help="read these, offline")
    folder = parser.parse_args(arguments).advisories
    packages = installed()
    try:
        if folder is None:
            found, source = ask(packages), "the vulnerability service"
        else:
            found, source = look_up(packages, folder)
    except NotAudited as error:
        print(f"audit: NOT DONE, nothing is known of what is installed:\n{error}", file=sys.stderr)
        print("give advisories that lie here: make audit ADVISORIES=FOLDER", file=sys.stderr)
        return 2
    code, lines = report(found, accepted())
    print(f"{len(packages)} packages against {source}", *lines, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
