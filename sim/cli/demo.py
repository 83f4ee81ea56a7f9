"""`cupyflash demo`: the main job end to end, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import click
import numpy as np

from cupyflash.basics import Array, Report
from cupyflash.calls import attention
from cupyflash.device import Device
from cupyflash.request.problem import Problem
from cupyflash.schedules import BackwardSchedule, TileSchedule, plan, plan_backward
from cupyflash.sim import theory
from cupyflash.sim.cli.group import Found
from cupyflash.sim.cli.request import on, refuse_longer
from cupyflash.sim.cli.show import detected, flat, say, show_table, show_tiling, tell, tiling_report, worst_error
from cupyflash.sim.cli.terminal import progress
from cupyflash.sim.estimate import seconds
from cupyflash.sim.host_memory import require_room, verified
from cupyflash.sim.names import NAMES
from cupyflash.sim.numbers.reference import reference, reference_gradients
from cupyflash.sim.traffic import Traffic
from cupyflash.sim.two_level import machine
from cupyflash.words import plural

WITNESSES = ("theory", "replay", "executed")


def demo(seqlen: int, heads: int, algorithm: str, device: Device, sram: str | None, max_seconds: float, as_json: bool) -> None:
    """Run the kernels, count their bytes."""
    from cupyflash.sim.execution import execute

    gpu = detected()
    device = on(device, sram)
    problem = Problem(1, heads, heads, seqlen, seqlen, 64, "float16", causal=True)
    schedules = {algorithm: plan(problem, device, algorithm) for algorithm in ("standard", algorithm)}
    backward = plan_backward(problem, device)
    estimate = sum(map(seconds, (*schedules.values(), backward)))
    refuse_longer(estimate, max_seconds)
    require_room(max(map(verified, (*schedules.values(), backward))), "this")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, seqlen, 64)).astype(np.float16) for _ in range(3))
    expected, _ = reference(q, k, v, causal=True)

    report: Report = {"problem": flat(problem), "device": device.name, "sram_bytes": device.sram_per_block}
    counts: dict[str, dict[str, Traffic]] = {}
    with progress(estimate) as steps:
        for name, schedule in schedules.items():
            steps.begin(f"compiling and executing {NAMES[name]} on the simulated {device.name}")
            execution = execute(schedule, q, k, v)
            counts[name], report[name] = witnesses(schedule, execution.traffic, execution.findings)
            report[name]["error"] = worst_error(execution.out, expected)
        steps.begin(f"compiling and executing the backward on the simulated {device.name}")
        report["backward"] = backward_demo(backward, rng.standard_normal(q.shape).astype(q.dtype), q, k, v)
    if gpu is not None:
        report["gpu"] = gpu_demo(gpu, q, k, v, expected)
    flash = counts[algorithm]["executed"].total_bytes
    report["ratio"] = counts["standard"]["executed"].total_bytes / flash
    report["standard_ideal_bytes"] = theory.standard_ideal(problem).total_bytes
    report["ratio_to_ideal"] = report["standard_ideal_bytes"] / flash
    tell(report, as_json, show_demo, problem, device, counts)
    if not all(report[one]["agree"] and not report[one]["findings"] for one in (*counts, "backward")):
        raise Found("theory, replay and execution do not agree, or the kernel has findings")


def witnesses(schedule: TileSchedule, executed: Traffic, findings: Sequence[object]) -> tuple[dict[str, Traffic], Report]:
    """The three counts of a schedule by name, and its report."""
    counts = {"theory": theory.traffic(schedule), "replay": machine.replay(schedule), "executed": executed}
    report = {
        "tiling": tiling_report(schedule),
        "findings": [str(finding) for finding in findings],
        "agree": len(set(counts.values())) == 1,
    }
    return counts, report | {witness: traffic.as_dict() for witness, traffic in counts.items()}


def backward_demo(schedule: BackwardSchedule, dout: Array, q: Array, k: Array, v: Array) -> Report:
    """The report of the gradients' kernels, from O and L in float64, rounded."""
    from cupyflash.sim.execution import execute_backward

    out, lse = reference(q, k, v, causal=True)
    execution = execute_backward(schedule, dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32))
    _, report = witnesses(schedule, execution.traffic, execution.findings)
    expected = reference_gradients(dout, q, k, v, causal=True)
    errors = {name: worst_error(getattr(execution, name.lower()), expected[name]) for name in ("dQ", "dK", "dV")}
    ideal = theory.standard_backward_ideal(schedule.problem).total_bytes
    ratio = ideal / execution.traffic.total_bytes
    return report | {"errors": errors, "standard_ideal_bytes": ideal, "ratio_to_ideal": ratio}


def show_demo(report: Report, problem: Problem, device: Device, counts: dict[str, dict[str, Traffic]]) -> None:
    """The demo's report as text."""
    flash = next(algorithm for algorithm in counts if algorithm != "standard")
    say(
        f"softmax(Q K' / sqrt(d)) V, causal: {plural(problem.heads, 'head')}, N {problem.seqlen_q:,}, d {problem.head_dim}, "
        f"{problem.dtype}, on a simulated {device.name} with {device.sram_per_block:,} bytes of SRAM a block"
    )
    click.echo(f"\n{NAMES[flash]}'s tiling")
    show_tiling(report[flash]["tiling"])
    click.echo("\nLargest error against float64")
    across = max(len(NAMES[algorithm]) for algorithm in counts) + 2
    for algorithm in counts:
        click.echo(f"  {NAMES[algorithm]:<{across}}{report[algorithm]['error']:.2e}")
    if "gpu" in report:
        click.echo(f"  {'on the GPU':<{across}}{report['gpu']['error']:.2e}  ({report['gpu']['device']})")
    click.echo()
    say("HBM bytes per tensor, read + written (executed: counted while the kernels' own PTX ran)")
    tensors = [
        name
        for name in ("Q", "K", "V", "S", "P", "O", "O_acc", "l", "m")
        if any(traffic[name].total_bytes for one in counts.values() for traffic in one.values())
    ]
    every = [one[witness] for one in counts.values() for witness in WITNESSES]
    rows = [(name, *(f"{traffic[name].total_bytes:,}" for traffic in every)) for name in tensors]
    rows.append(("total", *(f"{traffic.total_bytes:,}" for traffic in every)))
    titles = ("", *(NAMES[algorithm] for algorithm in counts for _ in WITNESSES))
    show_table(("", *WITNESSES * len(counts)), rows, titles=titles)
    agree, whose = all(report[algorithm]["agree"] for algorithm in counts), "" if flash == "fa1" else ", of FlashAttention (fa1),"
    click.echo()
    say(f"theory == replay == executed, tensor by tensor: {'yes' if agree else 'NO'}")
    say(
        f"standard / {NAMES[flash]}: {report['ratio']:.2f} times the bytes; {report['ratio_to_ideal']:.2f} times if standard "
        f"attention read each input once, as the paper counts it ({report['standard_ideal_bytes']:,})"
    )
    say(
        f"Theorem 2{whose} to leading order, with one item size: 12 N^2 d^2 / M against 4 N^2 elements. FlashAttention wins above "
        f"M = 3 d^2 = {theory.break_even_sram(problem.head_dim):,} elements; here M = {device.sram_per_block // problem.itemsize:,}"
    )
    show_backward(report["backward"])


def show_backward(report: Report) -> None:
    """The backward's part as text: totals."""
    click.echo()
    say("The gradients (FlashAttention-2's backward, what attention_backward runs): dQ, dK and dV from dO, O and L")
    errors = ", ".join(f"{name} {error:.2e}" for name, error in report["errors"].items())
    say(f"largest error against float64   {errors}", first="  ", rest="    ")
    sides = {"read_bytes": "read", "write_bytes": "written"}
    rows = [(name, *(f"{report[witness]['total'][side]:,}" for witness in WITNESSES)) for side, name in sides.items()]
    show_table(("HBM bytes", *WITNESSES), rows)
    say(
        f"theory == replay == executed, tensor by tensor: {'yes' if report['agree'] else 'NO'}; standard attention's gradients "
        f"would move {report['standard_ideal_bytes']:,}, {report['ratio_to_ideal']:.2f} times the bytes"
    )


def gpu_demo(gpu: Device, q: Array, k: Array, v: Array, expected: Array) -> Report:
    """Run the problem through `attention` on the GPU at hand."""
    import cupy

    out = attention(*(cupy.asarray(array) for array in (q, k, v)), causal=True)
    return {"device": gpu.name, "error": worst_error(cupy.asnumpy(out), expected)}
