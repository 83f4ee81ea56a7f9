"""What kernels that nobody here wrote ask of the machine: modules of which a part is not executed, messages, findings by place."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_harness import HEAD, kernel

from cupyflash.sim.profiling import profile
from cupyflash.sim.ptx import Module, UnsupportedPTX

REGISTERS = ".reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<6>;"
STORE = "ld.param.u64 %rd1, [y]; st.global.u32 [%rd1], 7;"


def entry(name: str, body: str) -> str:
    """A kernel of one pointer y, without the head of a module."""
    return kernel(body, (".u64 y",), REGISTERS, name).replace(HEAD, "")


# -- modules of which a part is not executed ------------------------------------------------------------------------------

PARTS = {
    "good": STORE,
    "unknown": "frobnicate.b32 %r1, %r2;\nadd.u32 %r1, %r1, 1;\nadd.rn.u32 %r1, %r1, 1;",
    "far": "call.uni through;",
    "declared": "mov.u64 %rd2, picture; st.global.u64 [%rd2], %rd2;",
    "inside": ".reg .b128 %wide;",
}
MODULE = (
    HEAD
    + ".global .texref picture;\n"
    + ".func deep () {\nfrobnicate.deep.b32 1;\nret;\n}\n.func through () {\ncall.uni deep;\nret;\n}\n"
    + ".func nobody () {\ntcgen05.fence;\nret;\n}\n"
    + "".join(entry(name, body) for name, body in PARTS.items())
)


def test_a_kernel_that_is_not_executed_leaves_the_others() -> None:
    module = Module.from_ptx(MODULE)
    y = np.zeros(1, np.uint32)
    assert module.launch("good", 1, 1, [y]).findings == () and y[0] == 7
    assert {name: [text.split()[0] for _, text, _ in items] for name, items in module.refused.items()} == {
        "unknown": ["frobnicate.b32", "add.rn.u32"],
        "far": ["frobnicate.deep.b32"],
        "declared": [".global"],
        "inside": [".reg"],
    }
    for name, items in module.refused.items():
        with pytest.raises(UnsupportedPTX, match=f"^{name}: ") as caught:
            module.launch(name, 1, 1, [y])
        assert tuple(caught.value.items) == items
        assert all(MODULE.splitlines()[line - 1].find(text.split()[0]) >= 0 for line, text, _ in items)


def test_a_module_without_a_kernel_left_is_refused_at_once() -> None:
    for text in (MODULE.replace("st.global.u32", "frobnicate.u32"), ".address_size 32\n" + HEAD + entry("good", STORE)):
        with pytest.raises(UnsupportedPTX):
            Module.from_ptx(text)


def test_a_profile_names_the_kernels_that_are_not_executed() -> None:
    found = profile(Module.from_ptx(MODULE), "good", grid=1, block=1, args={"y": np.zeros(1, np.uint32)})
    text = " ".join(found.text().split())
    assert "Not executed: unknown: line" in text and "opcode frobnicate is not executed (and 1 more)." in text
    assert [item["reason"] for item in found.to_dict()["refused"]["far"]] == ["opcode frobnicate is not executed"]


MESSAGES = {
    "mov.u64 %rd1, %current_graph_exec;": "special register %current_graph_exec is not executed",
    "mov.u32 %r1, %pm3;": "special register %pm3 is not executed",
    "mov.u32 %r1, %pmother;": "register %pmother is not declared",
    "frobnicate.b32 %r1, {{;": "opcode frobnicate is not executed",
    "@%p1 tcgen05.ld.b32 %r1, [%rd1, {%r1, %r2}];": "opcode tcgen05 is not executed",
    "ld.global.u32 %r1, [%rd1, {%r2, %r3}];": "address [%rd1, {%r2, %r3}] has a form that is not executed",
}


@pytest.mark.parametrize("line", MESSAGES)
def test_what_is_said_of_a_statement_that_is_not_executed(line: str) -> None:
    (item,) = Module.from_ptx(HEAD + entry("good", STORE) + entry("bad", line)).refused["bad"]
    assert item[1:] == (line.rstrip(";"), MESSAGES[line])
