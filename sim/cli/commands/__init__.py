"""The commands, declared without NumPy: options, help, examples. The modules beside this folder do their work."""

from __future__ import annotations

from cupyflash.sim.cli.commands.kernels import check, nvcc, profile, run, time
from cupyflash.sim.cli.commands.problems import explain, inspect, predict, sweep, trace, verify
from cupyflash.sim.cli.commands.tour import demo, devices, learn, paper

COMMANDS = (demo, learn, predict, verify, trace, sweep, paper, explain, inspect, profile, check, run, nvcc, time, devices)
"""The commands, in the order of a first tour."""
