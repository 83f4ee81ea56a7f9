"""Findings as other tools read them: compilers' lines, GitHub's annotations, JUnit, SARIF 2.1.0.

A file below the current folder is named relative to it, as the tools do that know a repository; others keep their whole path. The
machine knows lines, not columns: where a format needs one, it is 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

from cupyflash.basics import Report
from cupyflash.sim.names import FORMATS as FORMATS
from cupyflash.sim.ptx.state.findings import ERROR, KINDS, NOTE, WARNING, Finding, Suppressed, shorten
from cupyflash.sim.ptx.text.syntax import Line, source_name

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True)
class CheckedKernels:
    """The kernels that ran, by their names in the PTX, and what the machine found in them, notes too.

    `file` is the one that a finding without a line of source is shown at: the PTX itself, or a program.
    """

    kernels: Sequence[str]
    findings: Sequence[Finding]
    suppressed: Sequence[Suppressed] = ()
    file: str = ""

    def place(self, finding: Finding) -> Line:
        """Returns the line to show a finding at: the first below the current folder, of its own and those it is inlined at."""
        own = finding.source or (self.file or "PTX", finding.ptx_line)
        shown = [(near(file), line) for file, line in (own, *finding.inlined_at)]
        return next((at for at in shown if not os.path.isabs(at[0])), shown[0])


def near(file: str) -> str:
    """Returns a path relative to the current folder if it is below that, else unchanged."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here) if os.path.isabs(file) else file


def about(finding: Finding, shown: Line) -> str:
    """Returns a finding without its kind, and of its place only what the line that it is shown at does not say: inlined code."""
    place, _, rest = shorten(finding).partition(f" {finding.kind}: ")
    place = place.removesuffix(":").removesuffix(f": {finding.severity}").removeprefix(f"{shown[0]}:{shown[1]} ")
    return f"{place}: {rest}" if finding.inlined_at else rest


def lines(checked: CheckedKernels) -> str:
    """Returns FILE:LINE:COLUMN: SEVERITY: KIND: MESSAGE for each finding, as compilers write it."""
    places = ((checked.place(one), one) for one in checked.findings)
    return "".join(f"{file}:{line}:1: {one.severity}: {one.kind}: {about(one, (file, line))}\n" for (file, line), one in places)


GITHUB = {ERROR: "error", WARNING: "warning", NOTE: "notice"}


def github(checked: CheckedKernels) -> str:
    """Returns GitHub's workflow commands, which show each finding at its line of a pull request."""
    found = []
    for one in checked.findings:
        file, line = checked.place(one)
        values = {"file": file, "line": line, "title": f"cupyflash: {one.kind}"}
        shown = ",".join(f"{name}={escaped(str(value), ':,')}" for name, value in values.items())
        found.append(f"::{GITHUB[one.severity]} {shown}::{escaped(about(one, (file, line)))}\n")
    return "".join(found)


def escaped(text: str, more: str = "") -> str:
    """Returns text as a workflow command may have it: percent signs, ends of lines and the characters of `more` as %XX."""
    return "".join(f"%{ord(c):02X}" if c in "%\r\n" + more else c for c in text)


def junit(checked: CheckedKernels) -> str:
    """Returns a test for each kernel, which fails by an error or a warning."""
    suite = ElementTree.Element("testsuite", name="cupyflash", tests=str(len(checked.kernels)), errors="0")
    failed = 0
    for kernel in checked.kernels:
        mine = [one for one in checked.findings if one.kernel == kernel]
        faults = [one for one in mine if one.severity != NOTE]
        file = checked.place(mine[0])[0] if mine else near(checked.file)
        case = ElementTree.SubElement(suite, "testcase", classname=file, name=source_name(kernel))
        if faults:
            # Readers of JUnit files take one failure of a test.
            failed += 1
            failure = ElementTree.SubElement(case, "failure", type=faults[0].kind, message=clean(shorten(faults[0])))
            failure.text = clean("\n".join(map(shorten, faults)))
        if notes := [one for one in mine if one.severity == NOTE]:
            ElementTree.SubElement(case, "system-out").text = clean("\n".join(map(shorten, notes)))
    suite.set("failures", str(failed))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)).decode() + "\n"


def clean(text: str) -> str:
    """Returns text without the control characters that XML does not have."""
    return "".join(c for c in text if c >= " " or c in "\t\n")


def sarif(checked: CheckedKernels) -> str:
    """Returns a log of SARIF 2.1.0 with a result for each finding; suppressed ones say why."""
    shown: list[tuple[Finding, Suppressed | None]] = [(one, None) for one in checked.findings]
    shown += [(one, each) for each in checked.suppressed for one in each.findings]
    kinds = sorted({one.kind for one, _ in shown})
    rules = [{"id": rule(kind), "shortDescription": text(KINDS[kind].partition(" (`")[0])} for kind in kinds]
    try:
        ours = version("cupyflash")
    except PackageNotFoundError:
        ours = "0"
    run = {
        "tool": {"driver": {"name": "cupyflash", "version": ours, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "results": [result(checked, one, kinds.index(one.kind), by) for one, by in shown],
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def result(checked: CheckedKernels, finding: Finding, index: int, by: Suppressed | None) -> Report:
    """Returns a finding as a result of SARIF."""
    file, line = checked.place(finding)
    kernel = source_name(finding.kernel)
    inlined = [one for one in (finding.source, *finding.inlined_at) if one and (near(one[0]), one[1]) != (file, line)]
    sides = [("the same access", at) for at in inlined]
    sides += [("of the same cause", at) for at in finding.also if at[0] != "PTX"]
    if finding.other is not None and finding.other[0] != "PTX":
        sides.append(("the other access", finding.other))
    found: Report = {
        "ruleId": rule(finding.kind),
        "ruleIndex": index,
        "level": finding.severity,
        "message": text(about(finding, (file, line))),
        "locations": [physical(file, line) | {"logicalLocations": [{"fullyQualifiedName": kernel, "kind": "function"}]}],
        "partialFingerprints": {
            "kernelPlace/v1": f"{finding.kind}:{source_name(finding.kernel)}:{file}:{line}:{finding.tensor or ''}"
        },
    }
    if sides:
        found["relatedLocations"] = [
            {"id": number, **physical(near(at[0]), at[1]), "message": text(what)} for number, (what, at) in enumerate(sides)
        ]
    if by is not None:
        written = near(by.by.written[0]), by.by.written[1]
        kind = "inSource" if by.by.written[0] == (finding.source or ("",))[0] else "external"
        found["suppressions"] = [{"kind": kind, "justification": by.by.reason, "location": physical(*written)}]
    return found


def physical(file: str, line: int) -> Report:
    """Returns a line of a file as a location of SARIF: a URI, relative below the current folder."""
    if os.path.isabs(file):
        return {"physicalLocation": {"artifactLocation": {"uri": Path(file).as_uri()}, "region": {"startLine": line}}}
    where = {"uri": quote(file.replace(os.sep, "/")), "uriBaseId": "%SRCROOT%"}
    return {"physicalLocation": {"artifactLocation": where, "region": {"startLine": line}}}


def rule(kind: str) -> str:
    return kind.replace(" ", "-")


def text(words: str) -> dict[str, str]:
    return {"text": words}


WRITERS: Mapping[str, Callable[[CheckedKernels], str]] = {"lines": lines, "github": github, "junit": junit, "sarif": sarif}
"""The writers of `FORMATS`, but for text and JSON, which commands have themselves."""
