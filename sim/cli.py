"""The command line: `cupyflash demo`, `predict` and `devices`. Data goes to stdout, progress to stderr."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
import numpy as np

from cupyflash import __version__
from cupyflash.attention import attention
from cupyflash.device import Device
from cupyflash.problem import ITEMSIZE, Problem
from cupyflash.schedules import ALGORITHMS, TileSchedule, plan
from cupyflash.sim import machine, theory
from cupyflash.sim.reference import reference
from cupyflash.sim.traffic import Traffic
from cupyflash.simulated import DEFAULT_DEVICE
from cupyflash.tiling import TilingChoice

NAMES = {"standard": "standard", "fa1": "FlashAttention", "fa2": "FlashAttention-2"}
DTYPES = click.Choice(list(ITEMSIZE))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
SRAM = click.option("--sram", metavar="SIZE", help="SRAM of one block instead of the device's, 100KB say.")


class Friendly(click.Group):
    """Shows what a wrong value or a missing package is told as a usage error, not as a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (ValueError, TypeError, ImportError, OSError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Friendly, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Exact attention, and the HBM traffic that it costs: predicted, replayed, executed."""


@main.command()
@click.option("--seqlen", default=512, show_default=True, help="N: queries and keys a head.")
@click.option("--heads", default=4, show_default=True)
@click.option("--device", "device_name", default=DEFAULT_DEVICE, show_default=True, help="Device to simulate.")
@SRAM
@AS_JSON
def demo(seqlen: int, heads: int, device_name: str, sram: str | None, as_json: bool) -> None:
    """Run the real kernels on a causal problem (d 64, float16) and set their traffic beside theory."""
    from cupyflash.sim.execution import execute

    gpu = detected()
    device = Device.named(device_name, sram=sram)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, seqlen, 64)).astype(np.float16) for _ in range(3))
    problem = Problem.from_arrays(q, k, v, causal=True)
    expected, _ = reference(q, k, v, causal=True)

    report: dict[str, Any] = {"problem": asdict(problem), "device": device.name, "sram_bytes": device.sram_per_block}
    counts: dict[str, dict[str, Traffic]] = {}
    for algorithm in ("standard", "fa1"):
        schedule = plan(problem, device, algorithm)
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


@main.command()
@click.option("--seqlen", required=True, type=click.IntRange(0), help="N: queries a head, and keys unless --seqlen-k.")
@click.option("--seqlen-k", type=click.IntRange(0), help="Keys a head.")
@click.option("--head-dim", required=True, type=int, help="d")
@click.option("--heads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--kv-heads", type=click.IntRange(1), help="Heads of K and V, when fewer.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1))
@click.option("--dtype", default="float16", show_default=True, type=DTYPES)
@click.option("--device", "device_name", default=DEFAULT_DEVICE, show_default=True, help="A catalogue name or a .toml.")
@SRAM
@click.option("--causal", is_flag=True)
@click.option("--algorithm", default="fa1", show_default=True, type=click.Choice(ALGORITHMS))
@click.option("--tiling", "tiling_text", metavar="paper|BRxBC", help="Block sizes instead of the fitted ones.")
@click.option("--lse", is_flag=True, help="Count writing L as well.")
@AS_JSON
def predict(
    seqlen: int,
    seqlen_k: int | None,
    head_dim: int,
    heads: int,
    kv_heads: int | None,
    batch: int,
    dtype: str,
    device_name: str,
    sram: str | None,
    causal: bool,
    algorithm: str,
    tiling_text: str | None,
    lse: bool,
    as_json: bool,
) -> None:
    """Predict HBM reads and writes per tensor: the closed form, and the schedule replayed on an SRAM of M bytes."""
    device = Device.named(device_name, sram=sram)
    keys = seqlen if seqlen_k is None else seqlen_k
    problem = Problem(batch, heads, kv_heads or heads, seqlen, keys, head_dim, dtype, causal)
    schedule = plan(problem, device, algorithm, parse_tiling(tiling_text), lse=lse)
    form = theory.traffic(schedule)
    try:
        replayed: machine.Replay | None = machine.run(schedule)
        overflow = None
    except machine.SramOverflow as error:  # the paper's sizes need not fit: say so beside the closed form
        replayed, overflow = None, str(error)
    standard = theory.standard_ideal(problem)
    elements = device.sram_per_block // problem.itemsize
    flash, bound = (f(seqlen, head_dim, elements) for f in (theory.theorem2_flash, theory.lower_bound))
    bandwidth, peak = device.hbm_bandwidth, device.tensor_peak.get(dtype)
    report = {
        "problem": asdict(problem),
        "algorithm": algorithm,
        "device": {"name": device.name, "sram_bytes": device.sram_per_block, "sram_elements": elements},
        "tiling": tiling_report(schedule),
        "traffic": form.as_dict(),
        "replay_agrees": None if replayed is None else replayed.traffic == form,
        "peak_sram_bytes": None if replayed is None else replayed.peak_sram_bytes,
        "replay_refused": overflow,
        "extra_memory_bytes": schedule.workspace_bytes,
        "flops": problem.flops,
        "arithmetic_intensity": problem.flops / form.total_bytes if form.total_bytes else None,
        "machine_balance": peak / bandwidth if peak and bandwidth else None,
        "standard_ideal_bytes": standard.total_bytes,
        "ratio_to_standard": form.total_bytes / standard.total_bytes if standard.total_bytes else None,
        "theorem2_elements": {
            "flash N^2 d^2 / M": problem.head_count * flash,
            "standard N d + N^2": problem.head_count * theory.theorem2_standard(seqlen, head_dim),
            "in_range d <= M <= N d": theory.theorem2_holds_for(seqlen, head_dim, elements),
            "lower_bound_shape": problem.head_count * bound,
        },
    }
    click.echo(json.dumps(report, indent=2)) if as_json else show_prediction(report, form)


def show_prediction(report: dict[str, Any], form: Traffic) -> None:
    """A prediction as text."""
    problem, device = report["problem"], report["device"]
    click.echo(
        f"{NAMES[report['algorithm']]}: batch {problem['batch']}, heads {problem['heads']}, Nq {problem['seqlen_q']:,}, "
        f"Nk {problem['seqlen_k']:,}, d {problem['head_dim']}, {problem['dtype']}"
        f"{', causal' if problem['causal'] else ''}"
    )
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
        click.echo(f"arithmetic intensity: {report['arithmetic_intensity']:.1f} FLOP a byte (4 N^2 d, nothing skipped){beside}")
    if report["ratio_to_standard"] is not None:
        click.echo(
            f"{report['ratio_to_standard']:.3f} of the bytes of standard attention ({report['standard_ideal_bytes']:,}, "
            "each input of each step read once)"
        )
    shapes = report["theorem2_elements"]
    note = "" if shapes["in_range d <= M <= N d"] else " (M is outside d <= M <= N d: the theorem does not speak)"
    click.echo(
        f"Theorem 2, in elements, up to constants: N^2 d^2 / M = {shapes['flash N^2 d^2 / M']:,.0f} against "
        f"N d + N^2 = {shapes['standard N d + N^2']:,.0f}{note}"
    )
    click.echo(f"lower bound for any exact algorithm, its shape only: {shapes['lower_bound_shape']:,.0f}")


@main.command()
@AS_JSON
def devices(as_json: bool) -> None:
    """List the catalogue, and the GPU that is detected."""
    catalogue, gpu = Device.catalogue(), detected()
    if as_json:
        rows = [device_report(device) for device in catalogue]
        click.echo(json.dumps({"catalogue": rows, "detected": device_report(gpu) if gpu else None}, indent=2))
        return
    click.echo(
        f"{'device':<12}{'cc':>5}{'SRAM a block':>14}{'SRAM an SM':>12}{'SMs':>5}{'L2 MB':>7}{'HBM GB/s':>10}{'f16 TFLOP/s':>13}"
    )
    for device in (*catalogue, *([gpu] if gpu else [])):
        bandwidth = f"{device.hbm_bandwidth / 1e9:.0f}" if device.hbm_bandwidth else "-"
        peak = f"{device.tensor_peak['float16'] / 1e12:.0f}" if "float16" in device.tensor_peak else "-"
        click.echo(
            f"{device.name:<12}{'{}.{}'.format(*device.compute_capability):>5}{device.sram_per_block:>14,}"
            f"{device.sram_per_sm:>12,}{device.sm_count:>5}{device.l2_bytes / 2**20:>7.0f}{bandwidth:>10}{peak:>13}"
        )
    click.echo(f"\ndetected: {gpu.name if gpu else 'no GPU; NumPy arrays run on the simulated ' + DEFAULT_DEVICE}")


def detected() -> Device | None:
    """The current GPU, or None where there is none or no CuPy."""
    try:
        return Device.current()
    except (ImportError, RuntimeError):
        return None


def worst_error(out: np.ndarray, expected: np.ndarray) -> float:
    """The largest absolute difference."""
    return float(np.abs(out.astype(np.float64) - expected).max(initial=0))


def parse_tiling(text: str | None) -> TilingChoice:
    """--tiling's value as `plan` takes it."""
    if text is None or text == "paper":
        return "paper" if text else None
    rows, _, cols = text.partition("x")
    if not (rows.isdecimal() and cols.isdecimal()):
        raise click.BadParameter(f"'paper' or BRxBC such as 64x128, got {text!r}", param_hint="--tiling")
    return int(rows), int(cols)


def tiling_report(schedule: TileSchedule) -> dict[str, Any]:
    """The three stages of a tiling, for JSON."""
    tiling = schedule.tiling
    stages = {"paper": tiling.paper, "fitted": tiling.fitted, "used": tiling.used}
    return {name: None if size is None else asdict(size) for name, size in stages.items()}


def show_tiling(stages: dict[str, Any]) -> None:
    for name, size in stages.items():
        if size is None:
            click.echo(f"  {name:<8}nothing fits")
        else:
            click.echo(f"  {name:<8}Br {size['block_rows']:>4}  Bc {size['block_cols']:>5}  {size['reason']}")


def device_report(device: Device) -> dict[str, Any]:
    return asdict(device) | {"tensor_peak": dict(device.tensor_peak)}
