"""`cupyflash demo`: the main job end to end."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
import numpy as np

from cupyflash.attention import attention
from cupyflash.device import Device
from cupyflash.problem import Problem
from cupyflash.schedules import plan
from cupyflash.sim import machine, theory
from cupyflash.sim.cli.options import AS_JSON, DEVICE, SRAM
from cupyflash.sim.cli.show import NAMES, detected, show_tiling, tiling_report, worst_error
from cupyflash.sim.estimate import refuse_slow
from cupyflash.sim.reference import reference
from cupyflash.sim.traffic import Traffic
from cupyflash.simulated import current_simulation


@click.command()
@click.option("--seqlen", default=512, show_default=True, type=click.IntRange(1), help="N: queries and keys a head.")
@click.option("--heads", default=4, show_default=True, type=click.IntRange(1))
@DEVICE
@SRAM
@AS_JSON
def demo(seqlen: int, heads: int, device_name: str, sram: str | None, as_json: bool) -> None:
    """Run the real kernels on a causal problem (d 64, float16) and set their traffic beside theory."""
    from cupyflash.sim.execution import execute

    gpu = detected()
    device = Device.named(device_name, sram=sram)
    problem = Problem(1, heads, heads, seqlen, seqlen, 64, "float16", causal=True)
    schedules = {algorithm: plan(problem, device, algorithm) for algorithm in ("standard", "fa1")}
    try:
        for schedule in schedules.values():
            refuse_slow(schedule, current_simulation().max_seconds)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, seqlen, 64)).astype(np.float16) for _ in range(3))
    expected, _ = reference(q, k, v, causal=True)

    report: dict[str, Any] = {"problem": asdict(problem), "device": device.name, "sram_bytes": device.sram_per_block}
    counts: dict[str, dict[str, Traffic]] = {}
    for algorithm, schedule in schedules.items():
        click.echo(f"compiling and executing {NAMES[algorithm]} on the simulated {device.name} ...", err=True)
        execution = execute(schedule, q, k, v)
        counts[algorithm] = {
            "theory": theory.traffic(schedule),
            "replay": machine.replay(schedule),
            "executed": execution.traffic,
        }
        report[algorithm] = {
            "tiling": tiling_report(schedule),
            "error": worst_error(execution.out, expected),
            "findings": [str(finding) for finding in execution.findings],
            "agree": len(set(counts[algorithm].values())) == 1,
        } | {witness: traffic.as_dict() for witness, traffic in counts[algorithm].items()}
    if gpu is not None:
        report["gpu"] = gpu_demo(gpu, q, k, v, expected)
    flash = counts["fa1"]["executed"].total_bytes
    report["ratio"] = counts["standard"]["executed"].total_bytes / flash
    report["standard_ideal_bytes"] = theory.standard_ideal(problem).total_bytes
    report["ratio_to_ideal"] = report["standard_ideal_bytes"] / flash
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show_demo(report, problem, device, counts)
    if not all(report[algorithm]["agree"] and not report[algorithm]["findings"] for algorithm in counts):
        raise click.ClickException("theory, replay and execution do not agree, or the kernel has findings")


def show_demo(report: dict[str, Any], problem: Problem, device: Device, counts: dict[str, dict[str, Traffic]]) -> None:
    """The demo's report as text."""
    click.echo(
        f"softmax(Q K' / sqrt(d)) V, causal: {problem.heads} heads, N {problem.seqlen_q:,}, d {problem.head_dim}, "
        f"{problem.dtype}, on a simulated {device.name} with {device.sram_per_block:,} bytes of SRAM a block\n"
    )
    click.echo("FlashAttention's tiling")
    show_tiling(report["fa1"]["tiling"])
    click.echo("\nLargest error against float64")
    for algorithm in counts:
        click.echo(f"  {NAMES[algorithm]:<16}{report[algorithm]['error']:.2e}")
    if "gpu" in report:
        click.echo(f"  on the GPU      {report['gpu']['error']:.2e}  ({report['gpu']['device']})")
    click.echo("\nHBM bytes per tensor, read + written (executed: counted while the kernels' own PTX ran)")
    click.echo(f"  {'':7}{'standard':^45}   {'FlashAttention':^45}")
    witnesses = ("theory", "replay", "executed")
    click.echo(f"  {'':7}" + "   ".join("".join(f"{witness:>15}" for witness in witnesses) for _ in counts))
    tensors = [
        name
        for name in ("Q", "K", "V", "S", "P", "O", "O_acc", "l", "m")
        if any(traffic[name].total_bytes for one in counts.values() for traffic in one.values())
    ]
    for name in tensors:
        cells = ("".join(f"{one[witness][name].total_bytes:>15,}" for witness in witnesses) for one in counts.values())
        click.echo(f"  {name:<7}" + "   ".join(cells))
    cells = ("".join(f"{one[witness].total_bytes:>15,}" for witness in witnesses) for one in counts.values())
    click.echo(f"  {'total':<7}" + "   ".join(cells))
    agree = all(report[algorithm]["agree"] for algorithm in counts)
    click.echo(f"\ntheory == replay == executed, tensor by tensor: {'yes' if agree else 'NO'}")
    click.echo(
        f"standard / FlashAttention: {report['ratio']:.2f} times the bytes; {report['ratio_to_ideal']:.2f} times if standard "
        f"attention read each input once, as the paper counts it ({report['standard_ideal_bytes']:,})"
    )
    click.echo(
        f"Theorem 2 to leading order, with one item size: 12 N^2 d^2 / M against 4 N^2 elements. FlashAttention wins above M = "
        f"3 d^2 = {theory.break_even_sram(problem.head_dim):,} elements; here M = {device.sram_per_block // problem.itemsize:,}"
    )


def gpu_demo(gpu: Device, q: np.ndarray, k: np.ndarray, v: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """The same problem through `attention` on the GPU at hand."""
    import cupy

    out = attention(*(cupy.asarray(array) for array in (q, k, v)), causal=True)
    return {"device": gpu.name, "error": worst_error(cupy.asnumpy(out), expected)}
