"""``verify``: compares a model that is split over ranks with one process."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ringray.base.redaction import shown
from ringray.lab.cli.options import Option, Output, options, write
from ringray.lab.specs.fields import duration

if TYPE_CHECKING:
    from ringray.verification import Verdict


@options(
    Option("target", metavar="FILE", help="a Python file with build(), or module:function"),
    Option("--ranks", metavar="N", type=int, default=2, help="processes of the ring (2)"),
    Option("--adapter", metavar="NAME", help="how a plain model runs on ranks (default: our ring)"),
    Option("--probe", metavar="NAME", action="append", help="try this only; repeatable"),
    Option("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu"),
    Option("--limit", metavar="T", type=duration(1, 86400).argument, help="of a step: 60s, 5m"),
    Output("--json", metavar="F", help="write the verdict as JSON to F; - is stdout"),
    Output("-o", "--page", metavar="FILE", help="write the verdict as a page"),
)
def verify(arguments: argparse.Namespace) -> int:
    """Prints the verdict; returns 0 if everything is right, 1 if something is wrong."""
    from ringray.verification import verify as compare

    verdict = compare(
        arguments.target,
        ranks=arguments.ranks,
        adapter=arguments.adapter,
        probes=arguments.probe,
        device=arguments.device,
        limit=arguments.limit,
        view=sys.stderr if sys.stderr.isatty() else None,
    )
    if arguments.page is not None:
        write("--page", arguments.page, _page(verdict))
    if arguments.json is not None:
        write("--json", arguments.json, json.dumps(verdict.as_json(), allow_nan=False) + "\n")
    if "-" not in (arguments.json, arguments.page):
        print(shown(str(verdict)))
    return verdict.exit_code


def _page(verdict: Verdict) -> str:
    from ringray import __version__
    from ringray.lab.report.page import Code, Facts, PageTable, Section, Text, render

    answer = Text(verdict.title, "good" if verdict.right else "bad")
    rows = [[name, *result.partition(": ")[::2]] for name, result in verdict.probes.items()]
    probes = PageTable("What was tried", ("probe", "result", "why"), rows)
    findings = []
    for finding in verdict.findings:
        facts = Facts([("where", finding.place or "–"), ("look at", finding.advice)])
        blocks = [Text(finding.sentence, "bad"), facts, Code(finding.details)]
        title = f"{finding.probe}: {finding.mistake}"
        findings.append(Section(title, blocks if finding.details else blocks[:2]))
    sections = [Section("Verdict", [answer, probes, *map(Text, verdict.notes)])]
    sections += [Section("Findings", findings)] if findings else []
    about = f"ringray {__version__}, {verdict.ranks} ranks, in {verdict.seconds:.0f} s"
    return render(f"ringray verify {verdict.target}", sections, about)
