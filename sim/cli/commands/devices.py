"""`cupyflash devices`: the catalogue, the GPU at hand, and the device on which NumPy arrays run."""

from __future__ import annotations

from typing import Any

from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import AS_JSON, examples

EXAMPLES = examples("cupyflash devices", "cupyflash devices --json", "CUPYFLASH_DEVICE=H100-SXM cupyflash devices")


@command(epilog=EXAMPLES)
@AS_JSON
def devices(**given: Any) -> None:
    """List devices, and the GPU at hand.

    The catalogue has the figures that limit a kernel on a device, and the peaks of its data sheet. NumPy arrays run on a simulated
    device: CUPYFLASH_DEVICE names it, also for the --device of commands.
    """
    from cupyflash.sim.cli.devices import devices as work

    work(**given)
