"""Calls of device functions: direct, through a pointer, recursive; printf and other functions that the device provides.

A call runs in the registers and the local memory of the callee, which are laid out once. Only a call within a cycle of the
call graph needs more: it saves the registers of its lanes and the parameters of the functions in cycles, and its return restores
them. Local arrays of a function that calls itself would need a place for each level, and are refused: when the code is decoded if
it says so, else, for calls through pointers, when it happens.
"""

from __future__ import annotations

import re
import sys
from struct import Struct, calcsize, pack

import numpy as np

from ..decode.code import BUILTINS, SHARED_FRAME, has_local_arrays
from ..decode.registry import FunctionCall
from ..memory.spaces import BadCall, Caller, LaunchMemory
from ..state.lane_sets import LaneSet
from ..text.syntax import Array, Function, UnsupportedPTX
from .register_followers import Shadows
from .registers import RegisterFiles, WaveUnit

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d*))?(?P<length>hh|h|ll|l|j|z|t|L)?(?P<kind>.)", re.S
)


class _Arguments:
    """The argument buffer of vprintf: each at a multiple of its own size."""

    def __init__(self, memory: LaunchMemory, lane: int, address: int):
        self.memory, self.lane, self.address = memory, lane, address

    def take(self, kind: str) -> int | float:
        width = np.dtype(kind).itemsize
        self.address = -(-self.address // width) * width
        data = self.memory.peek(self.lane, self.address, width)
        self.address += width
        number: int | float = np.frombuffer(data.ljust(width, b"\0"), kind)[0].item()
        return number


def printf(memory: LaunchMemory, lane: int, form: int, buffer: int) -> str:
    """Returns the text that a lane prints: `form` and `buffer` are the generic addresses that it calls vprintf with."""
    arguments = _Arguments(memory, lane, buffer)

    def convert(match: re.Match[str]) -> str:
        kind, long = match["kind"], match["length"] in ("l", "ll", "j", "z", "t")
        if kind == "%":
            return "%"
        width, precision = match["width"] or "", match["precision"]
        if width == "*":
            width = str(arguments.take("i4"))
        if precision == "*":
            precision = str(arguments.take("i4"))
        spec = f"%{match['flags']}{width}" + ("" if precision is None else f".{precision}")
        if kind in "di":
            small = {"h": "i2", "hh": "i1"}.get(match["length"] or "")
            number = arguments.take("i8" if long else "i4")
            return f"{spec}d" % (np.int64(number).astype(small) if small else number)
        if kind in "uxXo":
            number = arguments.take("u8" if long else "u4")
            number = int(number) & {"h": 0xFFFF, "hh": 0xFF}.get(match["length"] or "", (1 << 64) - 1)
            # C writes the prefix of octal numbers as 0, Python as 0o; it writes none for zero.
            if "#" in match["flags"] and (kind == "o" or number == 0):
                spec = spec.replace("#", "")
                return f"{spec}o" % number if number == 0 else f"{spec}s" % f"0{number:o}"
            return f"{spec}{kind.replace('u', 'd')}" % number
        if kind in "fFeEgG":
            return f"{spec}{kind}" % arguments.take("f8")
        if kind in "aA":
            text = float.hex(float(arguments.take("f8")))
            return f"%{width}s" % (text.upper() if kind == "A" else text)
        if kind == "c":
            return f"{spec}s" % chr(int(arguments.take("i4")) & 0xFF)
        if kind == "s":
            return f"{spec}s" % memory.text(lane, int(arguments.take("u8")))
        if kind == "p":
            return f"%{match['flags']}{width}s" % f"{arguments.take('u8'):#x}"
        return match[0]

    return _CONVERSION.sub(convert, memory.text(lane, form))


DEEPEST = 1024
"""Most levels of recursion; deeper, a thread has overflown its stack (1024 bytes unless the host asks for more)."""


class DeviceFunctions(WaveUnit):
    """The calls of a wave."""

    def __init__(self, machine: RegisterFiles, shadows: Shadows):
        super().__init__(machine)
        self.shadows = shadows
        # The call instruction from which each lane came, by device function.
        self.sites = {f.name: np.zeros(self.wave.size, np.int64) for f in self.code.functions}
        self.by_name = {f.name: f for f in self.code.functions}
        self.depth = np.zeros(self.wave.size, np.int64)
        self.levels: list[list[Array]] = []
        """The saved state of each level of recursion."""
        again = {name for edge in self.code.cycles for name in edge}
        layout = self.code.local.offsets
        variables = [v for name in again for f in (self.by_name[name],) for v in (*f.params, *f.returns, *f.variables)]
        self.frames = [slice(layout[v.name], layout[v.name] + v.size) for v in variables if v.name in layout]
        """The local memory of functions in cycles. That of others is theirs alone: a callee may write it through a pointer."""

    def call(self, pc: int, control: FunctionCall, lanes: LaneSet) -> None:
        """Takes lanes to the function; each lane that calls through a pointer to its own."""
        if control.builtin:
            self.builtin(pc, control, lanes)
        elif control.function:
            self.enter(pc, control, self.by_name[control.function], lanes)
        else:
            addresses = self.machine.read(lanes, self.code.plans[pc].reads[0])
            ways = lanes.split(addresses)
            if len(ways) > 1:
                self.memory.tally.divergent[self.code.instructions[pc]] += sum(some.warps for _, some in ways) - lanes.warps
            for address, there in ways:
                name = self.code.function_names.get(address)
                if name not in control.candidates:
                    what = f"{name} with other parameters" if name else "no function"
                    message = f"call of {address:#x}, which is {what}"
                    self.machine.stop("bad call", message, pc, there)
                self.enter(pc, control, self.by_name[str(name)], there)

    def enter(self, pc: int, control: FunctionCall, function: Function, lanes: LaneSet) -> None:
        values = [self.bytes_of(lanes, mine, theirs.size) for mine, theirs in zip(control.arguments, function.params, strict=True)]
        caller = self.code.function_at[pc]
        if (caller, function.name) in self.code.cycles:
            if has_local_arrays(self.by_name[caller]):
                instruction = self.code.instructions[pc]
                raise UnsupportedPTX([(instruction.line, instruction.text, SHARED_FRAME)], self.code.kernel)
            self.save(pc, lanes)
        for theirs, value in zip(function.params, values, strict=True):
            self.set_bytes(lanes, theirs.name, value)
        self.sites[function.name][lanes.index] = pc
        self.push(self.code.starts[function.name], lanes)

    def give_back(self, pc: int, lanes: LaneSet) -> None:
        function = self.by_name[self.code.function_at[pc]]
        for site, back in lanes.split(self.sites[function.name][lanes.index]):
            control = self.code.plans[site].control
            assert isinstance(control, FunctionCall)
            values = [self.bytes_of(back, theirs.name, theirs.size) for theirs in function.returns]
            if (self.code.function_at[site], function.name) in self.code.cycles:
                self.restore(back)
            for mine, value in zip(control.results, values, strict=True):
                self.set_bytes(back, mine, value)
            self.push(site + 1, back)

    # -- recursion --------------------------------------------------------------------------------------------------------

    def state(self) -> list[Array]:
        """Returns everything that a return restores, the lanes on the last axis."""
        machine = self.machine
        frames = [self.local()[:, frame].T for frame in self.frames]
        return [*machine.full.files.values(), *frames, *self.sites.values(), *self.shadows.rows.values()]

    def save(self, pc: int, lanes: LaneSet) -> None:
        self.machine.deactivate()
        state = self.state()
        for depth, some in lanes.split(self.depth[lanes.index]):
            if depth == DEEPEST:
                self.machine.stop("stack overflow", f"more than {DEEPEST} calls within each other", pc, some)
            if depth == len(self.levels):
                self.levels.append([np.empty_like(each) for each in state])
            for now, kept in zip(state, self.levels[depth], strict=True):
                kept[..., some.index] = now[..., some.index]
        self.depth[lanes.index] += 1

    def restore(self, lanes: LaneSet) -> None:
        machine = self.machine
        machine.deactivate()
        self.depth[lanes.index] -= 1
        state = self.state()
        for depth, some in lanes.split(self.depth[lanes.index]):
            for now, kept in zip(state, self.levels[depth], strict=True):
                now[..., some.index] = kept[..., some.index]
        machine.rewritten(-1)
        for name in self.shadows.rows:
            self.shadows.changed(name, lanes)

    # -- parameters -------------------------------------------------------------------------------------------------------

    def local(self) -> Array:
        """Returns the local memory, a row of bytes a lane."""
        return self.memory.local[1].reshape(self.wave.size, -1)

    def bytes_of(self, lanes: LaneSet, variable: str, size: int) -> Array:
        """Returns a parameter or result of a call: (lanes, size) bytes of their local memory."""
        start = self.code.local.offsets[variable]
        return self.local()[lanes.index, start : start + size]

    def set_bytes(self, lanes: LaneSet, variable: str, value: Array) -> None:
        start = self.code.local.offsets[variable]
        self.local()[lanes.index, start : start + value.shape[1]] = value

    # -- functions of the device -------------------------------------------------------------------------------------------

    def builtin(self, pc: int, control: FunctionCall, lanes: LaneSet) -> None:
        parameters, result = BUILTINS[control.builtin]
        forms = parameters.split()
        given = [np.zeros((lanes.n, 0), np.uint8)]
        given += [self.bytes_of(lanes, name, calcsize(f"<{form}")) for name, form in zip(control.arguments, forms, strict=True)]
        memory, instruction, every = self.memory, self.code.instructions[pc], Struct("<" + "".join(forms))
        for n, data in enumerate(np.concatenate(given, axis=1)):
            lane, words = int(lanes.index[n]), every.unpack(data.tobytes())
            answer = 0
            if control.builtin == "__assertfail":
                text, file = (memory.text(lane, word) for word in words[:2])
                self.machine.stop("trap", f"assertion `{text}` failed at {file}:{words[2]}", pc, lanes)
            elif control.builtin == "vprintf":
                sys.stdout.write(printf(memory, lane, *words))
            else:
                me = lanes.subset(np.array([n]))
                try:
                    answer = self.machine.setup.runtime.call(
                        control.builtin, Caller(memory, me, instruction, self.code.function_names), words
                    )
                except BadCall as error:
                    self.machine.stop("bad call", str(error), pc, me)
            if control.results:
                value = np.frombuffer(pack(f"<{result}", answer), np.uint8)
                self.set_bytes(lanes.subset(np.array([n])), control.results[0], value[None, :])
        self.push(pc + 1, lanes)
