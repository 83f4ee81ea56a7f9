"""The PTX of a program that was compiled in parts (nvcc -rdc=true), as one module.

Names that a part shares (.visible, .weak, .extern, .common) are the same thing in all parts. Its other names are its own, and get
the number of the part where another part has the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from cupyflash.sim import ptx
from cupyflash.sim.ptx.text.parser import parse
from cupyflash.sim.ptx.text.syntax import PtxProgram

NAME = r"[A-Za-z_$%][\w$]*"
DECLARATION = re.compile(
    rf"^(?P<linkage>(?:\.(?:visible|extern|weak|common)\s+)*)"
    rf"\.(?:(?:entry|func)\s+(?:\([^)]*\)\s*)?(?P<function>{NAME})"
    rf"|(?:global|const|shared)\s[^;={{\n]*?(?P<variable>{NAME})(?:\[\d*\])*\s*[;=])",
    re.MULTILINE,
)


def linked(texts: Sequence[str]) -> ptx.Module:
    """Returns the module of these parts. Raises as `ptx.Module.from_ptx`."""
    if len(texts) == 1:
        return ptx.Module.from_ptx(texts[0])
    declared = [{m["function"] or m["variable"]: m["linkage"] for m in DECLARATION.finditer(text)} for text in texts]
    parts_with = Counter(name for names in declared for name in names)
    whole = PtxProgram({}, {}, "", [], {})
    joined = ""
    defined: set[str] = set()
    for number, (text, names) in enumerate(zip(texts, declared, strict=True)):
        own = [name for name, linkage in names.items() if not linkage and parts_with[name] > 1]
        if own:
            word = "|".join(map(re.escape, sorted(own, key=len, reverse=True)))
            text = re.sub(rf"(?<![\w$%])({word})(?![\w$])", rf"\g<1>$part{number}", text)
        # Lines are those of the joined text, so that no two instructions have one.
        program = parse("\n" * joined.count("\n") + text)
        joined += f"{text}\n"
        extern = {name for name, linkage in names.items() if "extern" in linkage}
        for name, function in program.functions.items():
            if name not in whole.functions or (function.defined and not whole.functions[name].defined):
                whole.functions[name] = function
        for name, variable in program.variables.items():
            if name not in whole.variables or name not in defined | extern:
                whole.variables[name] = variable
        defined |= names.keys() - extern
        whole.target = whole.target or program.target
        whole.unsupported.extend(program.unsupported)
        whole.unreadable.update(program.unreadable)
    for name in whole.variables.keys() & defined:
        whole.unreadable.pop(name, None)  # a part that declares an array without its size
    return ptx.Module(whole, joined, {})
