"""The commands, declared without NumPy: options, help, examples. The modules beside this folder do their work."""

from __future__ import annotations

from cupyflash.sim.cli.commands.check import check
from cupyflash.sim.cli.commands.demo import demo
from cupyflash.sim.cli.commands.devices import devices
from cupyflash.sim.cli.commands.explain import explain
from cupyflash.sim.cli.commands.inspect import inspect
from cupyflash.sim.cli.commands.learn import learn
from cupyflash.sim.cli.commands.nvcc import nvcc
from cupyflash.sim.cli.commands.paper import paper
from cupyflash.sim.cli.commands.predict import predict
from cupyflash.sim.cli.commands.profile import profile
from cupyflash.sim.cli.commands.run import run
from cupyflash.sim.cli.commands.sweep import sweep
from cupyflash.sim.cli.commands.time import time
from cupyflash.sim.cli.commands.trace import trace
from cupyflash.sim.cli.commands.verify import verify

COMMANDS = (demo, learn, predict, verify, trace, sweep, paper, explain, inspect, profile, check, run, nvcc, time, devices)
"""In the order of a first tour."""
