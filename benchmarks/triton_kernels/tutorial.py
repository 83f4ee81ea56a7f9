"""One tutorial of Triton on the PTX machine, for `__main__.py`:  tutorial.py FILE DEVICE ENTRY OUT [faults]"""

from __future__ import annotations

import json
import re
import runpy
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from barriers import BARRIER, reasons

from cupyflash.basics import Report
from cupyflash.sim.ptx import Finding, Launch, Module
from cupyflash.sim.triton import simulated_triton
from cupyflash.sim.triton.calls import KernelCall, base_of
from cupyflash.sim.triton.memory import Addresses
from cupyflash.sim.triton.timing import PredictedTime

NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


class Faults:
    """Runs each kernel's first launch also without each of its barriers; `found` has (found, barriers) by kernel."""

    def __init__(self, entry: Report):
        self.blocks, self.most = entry.get("fault_blocks", 8), entry.get("most_barriers", 12)
        self.found: dict[str, Report] = {}

    def seed(self, call: KernelCall, addresses: Addresses) -> None:
        places = list(BARRIER.finditer(call.module.text))
        if call.kernel in self.found or not places:
            return
        # Of many barriers so many are tried, evenly chosen; of a large grid the first blocks.
        chosen = places[:: -(-len(places) // self.most)]
        row = self.found[call.kernel] = {"barriers": len(places), "tried": len(chosen), "found": 0}
        grid = (min(call.grid[0], self.blocks), *(1 for _ in call.grid[1:])) if call.cluster is None else call.grid
        for base in filter(None.__ne__, (base_of(value) for _, value in call.values)):
            addresses.of(base)  # memory that has an address is put back below
        kept = [(memory, memory.memory().copy()) for memory in addresses.alive() if memory.writeable]
        usual = kinds(call.run(addresses, grid=grid))
        missed = []
        for place in chosen:
            text = call.module.text[: place.start()] + "\n" + call.module.text[place.end() :]
            for memory, data in kept:
                memory.memory()[:] = data
            launch = replace(call, module=Module.from_ptx(text)).run(addresses, grid=grid)
            if kinds(launch) - usual:
                row["found"] += 1
            else:
                missed.append(call.module.text[: place.start()].count("\n") + 1)
        for memory, data in kept:
            memory.memory()[:] = data
        row["missed"] = reasons(call.module.text, missed, lambda observer: call.run(addresses, grid=grid, observer=observer))
        for memory, data in kept:
            memory.memory()[:] = data


def kinds(launch: Launch) -> set[Any]:
    """The findings of a launch, each without its numbers: another launch may show the same fault in another lane."""
    return {(one.kind, one.severity, one.places, NUMBER.sub("", one.message)) for one in launch.findings}


def main() -> None:
    file, device, entry, out, *faults = sys.argv[1:]
    told = json.loads(entry)
    seeded, began = Faults(told), time.process_time()
    run = KernelCall.run
    if any(faults):

        def run_with_faults(self: KernelCall, addresses: Addresses) -> Launch:
            KernelCall.run = run
            seeded.seed(self, addresses)
            KernelCall.run = run_with_faults
            return run(self, addresses)

        KernelCall.run = run_with_faults
    source = Path(file).read_text()
    if "until" in told:  # what is behind it is larger than this machine's time
        source = source[: source.index(told["until"])] + told.get("instead", "")
    place = Path(file).with_name(f"run_{Path(file).name}")
    place.write_text(source)
    report: Report = {}
    limit = 0 if any(faults) else told.get("benchmark_seconds", 5)
    with (
        simulated_triton(device, findings="keep", benchmark_seconds=limit) as launches,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        sys.argv = [str(place)]
        try:
            runpy.run_path(str(place), run_name="__main__")
        finally:
            place.unlink()
            report["launches"] = len(launches)
            report["instructions"] = sum(launch.counters.instructions for launch in launches)
            report["findings"] = dict(Counter(place_of(one) for launch in launches for one in launch.findings))
            report["seconds"] = round(time.process_time() - began, 1)
            texts = {str(one.message) for one in said if one.category is PredictedTime}
            report["timed"] = sum("predicted for" in text for text in texts)
            report["untimed"] = sorted({re.sub(r".*nan: ", "", text)[:80] for text in texts if "has no time for it" in text})
            if any(faults):
                report["faults"] = seeded.found
            Path(out).write_text(json.dumps(report))


def place_of(finding: Finding) -> str:
    """A finding's severity, kind and first place."""
    file, line = finding.places[0]
    return f"{finding.severity}: {finding.kind} at {Path(file).name.removeprefix('run_')}:{line}"


if __name__ == "__main__":
    main()
