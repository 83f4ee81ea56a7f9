"""Machine code that LLVM makes of texts, in this process; kept on disk, beside CuPy's kernels, as cubins are (`launch.cubins`).

A kernel's own text is a unit, and so is each of the functions that many kernels call. Such a function's name ends with a digest
of its text, so that it is compiled once for all kernels, and known by its name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cupyflash.launch import first_use, own_files

DIGEST = hashlib.sha256().digest_size

DEFINED = re.compile(r"define internal ([^@]*)@([\w.]+)(\([^{]*?\))\s*(noinline|alwaysinline)?\s*\{")
"""A function of a unit: the type of its result, its name, its parameters, and whether it is put in place of its calls."""

NAMED = re.compile(r"@([\w.]+)")


class CompiledUnit(NamedTuple):
    """A text that becomes an object file, and the name by which it is known.

    `optimised`: LLVM takes its time for a function that is compiled once, and is most of what a kernel does; a kernel's own text
    may be long, and gets one pass: it then runs as fast.
    """

    name: str
    text: str
    optimised: bool


def units(own: str, shared: Sequence[str], declared: str) -> Iterator[CompiledUnit]:
    """Yields the units of a kernel, `own` last: `@stretch` becomes its name. Each of the `shared` texts may call those before it;
    `declared` are declarations that all of them need.
    """
    known: dict[str, tuple[str, str]] = {}  # the new name and the declaration of a function of a unit
    placed: dict[str, str] = {}  # the text of one that is put in place of its calls

    def above(text: str) -> Iterator[str]:
        """Yields what a text needs of others: their texts, or declarations."""
        defined = {name for _, name, _, _ in DEFINED.findall(text)}
        for name in dict.fromkeys(NAMED.findall(text)):
            if name in placed and name not in defined:
                yield from above(placed[name])
                yield placed[name]
            elif name in known:
                yield known[name][1]

    def whole(text: str) -> str:
        """Returns a text with what it needs."""
        together = "\n".join([*dict.fromkeys(above(text)), text])
        return NAMED.sub(lambda found: f"@{known[found[1]][0]}" if found[1] in known else found[0], together)

    for text in shared:
        found = DEFINED.findall(text)
        if all(how == "alwaysinline" for *_, how in found):
            placed |= dict.fromkeys((name for _, name, _, _ in found), text)
            continue
        made = whole(text)
        key = hashlib.sha256(made.encode()).hexdigest()[:20]
        for result, name, parameters, how in found:
            if how != "alwaysinline":
                fresh = f"{name}.{key}"
                known[name] = fresh, f"declare {result}@{fresh}{' '.join(parameters.split())}"
                made = re.sub(rf"define internal ([^@]*)@{re.escape(name)}\(", rf"define \1@{fresh}(", made)
                made = re.sub(rf"@{re.escape(name)}\(", f"@{fresh}(", made)
        yield CompiledUnit(key, made + declared, True)
    made = whole(own)
    key = hashlib.sha256(made.encode()).hexdigest()[:40]
    yield CompiledUnit(f"stretch_{key}", made.replace("@stretch(", f"@stretch_{key}(") + declared, False)


class Compiler:
    """LLVM in this process."""

    def __init__(self) -> None:
        try:
            import llvmlite
            import llvmlite.binding as llvm
        except ImportError:
            raise ImportError("CUPYFLASH_ENGINE=llvm needs llvmlite: pip install 'cupyflash[sim]'") from None
        from cupyflash.launch import cubins

        self.llvm: Any = llvm
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        cpu = target.triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        self.machine, self.quick = (target.create_target_machine(cpu=cpu[1], features=cpu[2], opt=level) for level in (2, 0))
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self.machine)
        self.version = repr((llvmlite.__version__, llvm.llvm_version_info, cpu))
        self.folder = None if cubins.asked(cubins.IN_MEMORY) else first_use.cache_folder() / "cupyflash_stretches"
        self.loaded: set[str] = set()

    def function(self, own: str, shared: Sequence[str], declared: str) -> int:
        """Returns the address of a kernel's function. Machine code that is kept is taken, other is compiled."""
        name = ""
        for unit in units(own, shared, declared):
            name = unit.name
            if name not in self.loaded:
                self.engine.add_object_file(self.llvm.ObjectFileRef.from_data(self.code(unit)))
                self.loaded.add(name)
        self.engine.finalize_object()
        found: int = self.engine.get_function_address(name)
        return found

    def code(self, unit: CompiledUnit) -> bytes:
        """Returns the object file of a unit."""
        key = hashlib.sha256(f"{self.version}\n{unit.optimised}\n{unit.text}".encode()).hexdigest()[:40]
        path = None if self.folder is None else self.folder / f"{key}.o"
        found = None if path is None else kept(path)
        if found is None:
            found = self.compiled(unit)
            if path is not None:
                keep(path, found)
        return found

    def compiled(self, unit: CompiledUnit) -> bytes:
        llvm = self.llvm
        module = llvm.parse_assembly(unit.text)
        module.verify()
        machine = self.machine if unit.optimised else self.quick
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = True
        builder = llvm.create_pass_builder(machine, options)
        if unit.optimised:
            passes = builder.getModulePassManager()
        else:
            passes = llvm.create_new_module_pass_manager()
            passes.add_sroa_pass()
        passes.run(module, builder)
        found: bytes = machine.emit_object(module)
        return found


def digest(path: Path, code: bytes) -> bytes:
    return hashlib.sha256(path.stem.encode() + code).digest()


def kept(path: Path) -> bytes | None:
    """Returns the machine code that `keep` stored; None if there is no file, or not the one that this user wrote so."""
    try:
        found = own_files.read(path)
    except OSError:
        return None
    return found[DIGEST:] if found[:DIGEST] == digest(path, found[DIGEST:]) else None


def keep(path: Path, code: bytes) -> None:
    """Stores machine code; warns if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own_files.write(path, digest(path, code) + code)
    except OSError as error:
        first_use.cache_is_unusable(path.parent, error)


@cache
def compiler() -> Compiler:
    found = Compiler()
    if found.folder is not None:
        own_files.sweep(found.folder)
    return found
