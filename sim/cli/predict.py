"""`cupyflash predict`: the closed form, and the schedule replayed."""

from __future__ import annotations

import json
from typing import Any

import click

from cupyflash.sim import machine, theory
from cupyflash.sim.cli.options import AS_JSON, Request, problem_options
from cupyflash.sim.cli.show import show_tiling, tiling_report
from cupyflash.sim.traffic import Traffic


@click.command()
@problem_options(backward=True)
@AS_JSON
def predict(request: Request, as_json: bool) -> None:
    """Predict HBM reads and writes per tensor: the closed form, and the schedule replayed on an SRAM of M bytes."""
    problem, device, schedule = request.problem, request.device, request.schedule()
    form = theory.traffic(schedule)
    try:
        replayed: machine.Replay | None = machine.run(schedule)
        overflow = None
    except (machine.SramOverflow, machine.TooLong) as error:  # the closed form stands by itself: say why
        replayed, overflow = None, str(error)
    standard = (theory.standard_backward_ideal if request.backward else theory.standard_ideal)(problem)
    flops, theorem = (problem.backward_flops, 5) if request.backward else (problem.flops, 2)
    elements = device.sram_per_block // problem.itemsize
    N, d = problem.seqlen_q, problem.head_dim
    flash, bound = (f(N, d, elements) for f in (theory.theorem2_flash, theory.lower_bound))
    bandwidth, peak = device.hbm_bandwidth, device.tensor_peak.get(problem.dtype)
    report = {
        **request.report,
        "device": {"name": device.name, "sram_bytes": device.sram_per_block, "sram_elements": elements},
        "tiling": tiling_report(schedule),
        "traffic": form.as_dict(),
        "replay_agrees": None if replayed is None else replayed.traffic == form,
        "peak_sram_bytes": None if replayed is None else replayed.peak_sram_bytes,
        "replay_refused": overflow,
        "extra_memory_bytes": schedule.workspace_bytes,
        "flops": flops,
        "arithmetic_intensity": flops / form.total_bytes if form.total_bytes else None,
        "machine_balance": peak / bandwidth if peak and bandwidth else None,
        "standard_ideal_bytes": standard.total_bytes,
        "ratio_to_standard": form.total_bytes / standard.total_bytes if standard.total_bytes else None,
        f"theorem{theorem}_elements": {
            "flash N^2 d^2 / M": problem.head_count * flash,
            "standard N d + N^2": problem.head_count * theory.theorem2_standard(N, d),
            "in_range d <= M <= N d": theory.theorem2_holds_for(N, d, elements),
            "lower_bound_shape": problem.head_count * bound,
        },
    }
    click.echo(json.dumps(report, indent=2)) if as_json else show_prediction(report, request, form)


def show_prediction(report: dict[str, Any], request: Request, form: Traffic) -> None:
    """A prediction as text."""
    device = report["device"]
    theorem, count, other = (5, 10, "standard attention's backward") if request.backward else (2, 4, "standard attention")
    click.echo(request.title)
    click.echo(f"{device['name']}: M = {device['sram_bytes']:,} bytes = {device['sram_elements']:,} elements\n")
    show_tiling(report["tiling"])
    click.echo(f"\n  {'tensor':<8}{'bytes read':>24}{'bytes written':>24}")
    for name, row in form.as_dict().items():
        click.echo(f"  {name:<8}{row['read_bytes']:>24,}{row['write_bytes']:>24,}")
    if report["replay_refused"]:
        click.echo(f"\nreplay on the SRAM machine refused: {report['replay_refused']}")
    else:
        agrees = "agrees" if report["replay_agrees"] else "DISAGREES"
        click.echo(f"\nreplay on the SRAM machine {agrees}; it held {report['peak_sram_bytes']:,} bytes at most")
    click.echo(f"extra memory: {report['extra_memory_bytes']:,} bytes")
    if report["arithmetic_intensity"] is not None:
        balance = report["machine_balance"]
        beside = f"; the device balances at {balance:.0f}" if balance else ""
        click.echo(
            f"arithmetic intensity: {report['arithmetic_intensity']:.1f} FLOP a byte ({count} N^2 d, nothing skipped){beside}"
        )
    if report["ratio_to_standard"] is not None:
        click.echo(
            f"{report['ratio_to_standard']:.3f} of the bytes of {other} ({report['standard_ideal_bytes']:,}, "
            "each input of each step read once)"
        )
    shapes = report[f"theorem{theorem}_elements"]
    note = "" if shapes["in_range d <= M <= N d"] else " (M is outside d <= M <= N d: the theorem does not speak)"
    click.echo(
        f"Theorem {theorem}, in elements, up to constants: N^2 d^2 / M = {shapes['flash N^2 d^2 / M']:,.0f} against "
        f"N d + N^2 = {shapes['standard N d + N^2']:,.0f}{note}"
    )
    click.echo(f"lower bound for any exact algorithm, its shape only: {shapes['lower_bound_shape']:,.0f}")
