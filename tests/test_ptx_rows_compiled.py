"""Each row of the table of opcodes gives the same bits by NumPy and by compiled code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
import pytest

from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx import module as launches
from cupyflash.sim.ptx.decode.table_rows import HALF_TYPES, KINDS, ROWS, OpcodeRow, meaning
from cupyflash.sim.ptx.decode.table_rows import Case as RowCase
from cupyflash.sim.ptx.text.syntax import Imm, PtxType, UnsupportedPTX
from suites import sample

LANES = 2560
COMPILED = {"add", "sub", "mul", "mad", "fma", "and", "or", "xor", "shl", "shr", "min", "max", "selp", "prmt", "bfe", "popc", "cvt"}
HEAD = ".version 8.8\n.target sm_90\n.address_size 64\n.visible .entry k("


def instructions(row: OpcodeRow) -> Iterator[tuple[str, RowCase, str]]:
    """Yields instructions that a row describes, what they are, and their expression: each type, and each modifier with one type."""
    seen = set()
    types = [[KINDS[name] for name in names] for names in row.types]
    optional = ["", *(name for group in row.optional for name in group)]
    keys = row.text if isinstance(row.text, Mapping) else [""]
    for *chosen, need, mod, key in product(*types, row.required or [""], optional, keys):
        if mod and (mod, key) in seen:
            continue
        seen.add((mod, key))
        mods = [one for one in (*key.split("."), need, mod) if one]
        case = RowCase(row.opcode, frozenset(mods), tuple(chosen), [Imm(0)] * (5 if row.opcode != "lop3" else 4) + [Imm(0xB4)])
        try:
            text = row.text[key] if isinstance(row.text, Mapping) else row.text if isinstance(row.text, str) else row.text(case)
        except Exception:
            continue
        yield ".".join([row.opcode, *mods, *(one.name for one in chosen)]), case, text


def program(name: str, case: RowCase, text: str) -> str | None:
    """Returns a kernel with one instruction: its operands come from arrays of 8 bytes a lane, its results go to such."""
    found = meaning(text, case.types[-1])
    own = {"d": case.types[0], **dict.fromkeys("abce", case.types[-1])}
    names = (*found.targets, *found.reads)
    kinds: dict[str, PtxType] = {n: KINDS.get(found.views.get(n, "")) or own.get(n, case.types[-1]) for n in names}
    others = any(kind.name.endswith("x2") and kind.name not in HALF_TYPES for kind in kinds.values())
    if "carry" in kinds or "q" in found.targets or others:
        return None
    sources = [n for n in found.reads if n in "abce"]
    body = ["mov.u32 %t, %tid.x;", "mov.u32 %z, %ctaid.x;", "mad.lo.u32 %t, %z, 128, %t;", "mul.wide.u32 %o, %t, 8;"]
    declared = [".reg .b32 %t, %z;", ".reg .b64 %o, %x;", ".reg .pred %no;"]
    for n in sources:
        bits = max(kinds[n].bits, 16)
        register = f".reg .b{bits} %{n};" if kinds[n].name != "pred" else f".reg .pred %{n};"
        declared.append(register)
        body += [f"ld.param.u64 %x, [{n.upper()}];", "add.u64 %x, %x, %o;"]
        if kinds[n].name == "pred":
            body += ["ld.global.u32 %z, [%x];", "and.b32 %z, %z, 1;", f"setp.ne.u32 %{n}, %z, 0;"]
        else:
            body.append(f"ld.global.b{bits} %{n}, [%x];")
    (target,) = found.targets
    kind = kinds[target]
    declared.append(".reg .pred %d;" if kind.name == "pred" else f".reg .b{max(kind.bits, 16)} %d;")
    last = [str(0xB4)] if case.opcode == "lop3" else []
    listed = ", ".join(["%d", *(f"%{n}" for n in sources), *last])
    body += [f"{name} {listed};", "ld.param.u64 %x, [D];", "add.u64 %x, %x, %o;"]
    if kind.name == "pred":
        body += ["selp.u32 %z, 1, 0, %d;", "st.global.u32 [%x], %z;"]
    else:
        body.append(f"st.global.b{max(kind.bits, 16)} [%x], %d;")
    parameters = ", ".join(f".param .u64 {n}" for n in "ABCED")
    return "\n".join([f"{HEAD}{parameters}) {{", *declared, *body, "ret;", "}"])


def numbers(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Operands, 8 bytes each: any bits, small whole numbers, or ordinary floating-point numbers in one width."""
    if kind == "bits":
        return rng.integers(0, 2**63, LANES).astype(np.uint64) * np.uint64(2) + rng.integers(0, 2, LANES).astype(np.uint64)
    if kind == "few":
        return rng.choice(np.array([0, 1, 2, 7, 31, 32, 33, 63, 64, 2**31, 2**32 - 1, 2**63, 2**64 - 1], np.uint64), LANES)
    if kind in ("halves", "bfloats"):
        four = rng.standard_normal(4 * LANES) * 2.0 ** rng.integers(-20, 12, 4 * LANES)
        four[rng.random(4 * LANES) < 0.2] = 0.0
        four = np.copysign(four, rng.standard_normal(4 * LANES)).astype(np.float32)
        bits = four.astype(np.float16).view(np.uint16) if kind == "halves" else (four.view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint64)
    values = rng.standard_normal(LANES) * 2.0 ** rng.integers(-20, 20, LANES)
    if kind == "double":
        return values.view(np.uint64)
    low = values.astype(np.float32)
    if kind == "special":
        low = rng.choice(np.array([0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, -1e-40, 2.0**-126, 3e38, 2.5, -7.0], np.float32), LANES)
    return low.view(np.uint32).astype(np.uint64) | low.view(np.uint32).astype(np.uint64) << np.uint64(32)


@pytest.mark.parametrize("opcode", sample(sorted(ROWS), ["prmt"]))
def test_compiled_rows_give_the_bits_of_numpy(opcode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite", reason="the extra llvm brings it")
    own, ran, rng = launches.run_compiled, [], np.random.default_rng(1)
    monkeypatch.setattr(launches, "run_compiled", lambda *given: ran.append(own(*given)) or ran[-1])
    for row in ROWS[opcode]:
        for name, case, text in instructions(row):
            source = program(name, case, text)
            if source is None:
                continue
            try:
                kernel = Module.from_ptx(source)
                kernel.code("k")
            except (UnsupportedPTX, ValueError):
                continue
            halves = any(one.name in HALF_TYPES for one in case.types)
            for kind in ("bits", "few", "single", "special", *(("halves", "bfloats") if halves else ())):
                operands = [numbers(kind, rng) for _ in "abce"]
                results = []
                for engine in ("numpy", "llvm"):
                    monkeypatch.setenv("CUPYFLASH_ENGINE", engine)
                    kernel.code("k").gave_up = False
                    out = np.zeros(LANES, np.uint64)
                    kernel.launch("k", LANES // 128, 128, [*operands, out])
                    results.append(out)
                same = results[0] == results[1]
                at = int(np.argmin(same))
                shown = [f"{x[at]:#x}" for x in (*operands, *results)]
                assert same.all(), f"{name}, {kind}: operands and results {shown}"
    if opcode in COMPILED:
        assert any(ran)  # of the others all may be NumPy's
