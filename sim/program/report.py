"""The report of a program's run: kernels, findings, and all that the simulation could not or did not do."""

from __future__ import annotations

from cupyflash.basics import Report
from cupyflash.sim.profiling import told
from cupyflash.sim.program.launches import KernelRecord, estimated
from cupyflash.sim.program.session import ProgramResult
from cupyflash.sim.ptx.state.findings import Finding, Suppressed, by_cause, counted, of_program, shorten
from cupyflash.sim.ptx.text.syntax import source_name
from cupyflash.words import plural


def found(kernel: KernelRecord) -> tuple[Finding, ...]:
    """Returns the findings of a kernel in all its launches, one for each cause, then its notes."""
    return by_cause([*kernel.findings.values(), *kernel.notes.values()], of_program)


def suppressed(kernel: KernelRecord) -> list[Suppressed]:
    """Returns the findings of a kernel that suppressions let pass."""
    return [Suppressed(by, by_cause(findings.values(), of_program)) for by, findings in kernel.suppressed.items()]


def report(result: ProgramResult) -> str:
    """Returns the report as text, a line each: kernels, findings, then what to know about the run."""
    lines = []
    for kernel in result.kernels:
        findings = found(kernel)
        again = f", {kernel.repeated} of them repeats that were not executed again" if kernel.repeated else ""
        count = plural(kernel.launches, "launch", "launches")
        if kernel.unfinished:
            again += ", the last one not to its end"
            again += f" ({estimated(kernel.estimate)})" if kernel.estimate else ""
        how = f"{count}{again}, {kernel.seconds:.1f} s: " if kernel.launches else ""  # none: a function that copies
        lines.append(f"{source_name(kernel.name)}: {how}{counted(findings) or 'no finding'}")
        lines += [f"  {shorten(finding)}" for finding in findings]
        lines += [f"  {shorten(one)}" for one in suppressed(kernel)]
    lines += [f"{name} is not simulated ({plural(count, 'call')})" for name, count in result.missing.items()]
    lines += [f"{name} returned {error}" for name, error in result.failed if name not in result.missing]
    if result.memory:
        lines.append(f"ended for want of memory ({result.memory}): what came after was not checked")
    elif result.cut:
        lines.append(f"ended after {result.seconds:.0f} s of processor time (--max-seconds): what came after was not checked")
    if result.predicted:
        lines.append("times that the program measured are a model's (docs/clock.md), not a GPU's: its kernels', one after another")
    if result.timed:
        some = "other " if result.predicted else ""
        lines.append(f"{some}times that the program measured are the simulation's, not a GPU's")
    if result.status < 0 and not result.cut:
        lines.append(f"the program was ended by signal {-result.status}")
    return "\n".join(["", *lines] if lines else ["", "no kernel was launched"])


def summary(result: ProgramResult) -> Report:
    """Returns the report for `--json`."""
    kernels = [
        {
            "kernel": kernel.name,
            "launches": kernel.launches,
            "repeated": kernel.repeated,
            "unfinished": kernel.unfinished,
            "seconds": kernel.seconds,
            "estimate": None if kernel.estimate is None else vars(kernel.estimate),
            "instructions": kernel.instructions,
            "findings": told(found(kernel)),
            "suppressed": [{"by": vars(one.by), "findings": told(one.findings), "text": str(one)} for one in suppressed(kernel)],
        }
        for kernel in result.kernels
    ]
    failed = [{"function": name, "error": error, "calls": count} for (name, error), count in result.failed.items()]
    return {
        "status": result.status,
        "kernels": kernels,
        "missing": result.missing,
        "failed": failed,
        "cut": result.cut,
        "memory": result.memory,
        "timed": result.timed,
        "predicted": result.predicted,
    }
