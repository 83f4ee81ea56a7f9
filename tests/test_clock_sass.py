"""sim/clock/sass.py: machine code is read as the assembler wrote it."""

from __future__ import annotations

import random

import pytest

from cupyflash.sim.clock import sass
from cupyflash.sim.clock.sass import Control


@pytest.mark.parametrize("seed", range(3))
def test_a_control_code_is_read_from_bits_105_to_125(seed: int) -> None:
    chance = random.Random(seed)
    stall, writes, reads, waits, reuse = (chance.randrange(1 << bits) for bits in (4, 3, 3, 6, 4))
    yields = chance.randrange(2)
    code = stall | (1 - yields) << 4 | writes << 5 | reads << 8 | waits << 11 | reuse << 17
    word = chance.randrange(1 << 105) | code << 105 | chance.randrange(4) << 126
    expected = tuple(board for board in range(6) if waits >> board & 1)
    found = Control.decode(word)
    assert found == Control(stall, bool(yields), None if writes == 7 else writes, None if reads == 7 else reads, expected, reuse)


LISTING = """
        Function : kernel
        /*0000*/                   LDG.E.128 R4, [R2.64] ;                     /* 0x0000000402047981 */
                                                                               /* 0x000ea8000c1e1d00 */
        /*0010*/              @!P0 BRA 0x0 ;                                   /* 0xffffffe000008947 */
                                                                               /* 0x004fea000383ffff */
"""


def test_a_listing_is_read_with_guards_operands_and_targets() -> None:
    load, branch = sass.parse(LISTING)["kernel"]
    assert (load.opcode, load.modifiers, load.operands, load.guard) == ("LDG", ("E", "128"), ("R4", "[R2.64]"), "")
    assert (load.control.stall, load.control.writes, load.control.reads, load.control.waits) == (4, 2, None, ())
    assert (branch.opcode, branch.guard, branch.target, branch.control.waits) == ("BRA", "!P0", 0, (2,))
    with pytest.raises(ValueError, match="no control code"):
        sass.parse("\n".join(line for line in LISTING.splitlines() if "0x000ea8" not in line))
