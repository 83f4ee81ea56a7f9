"""Kernels' machine code read and costed without a GPU: control codes, the trace of a loop, a clock model of a multiprocessor.

    sass      instructions with their control codes, from a cubin
    flow      which way a warp goes: loops, branches, the trace of a loop's steady turn
    rates     what the model assumes of a multiprocessor, each figure with its source; which opcode goes to which unit
    clocks    the model: one multiprocessor issuing traces, clock by clock
    costs     a loop's figures: counts, bounds, the model's share of the peak, how it moves with the assumptions
    hopper    one turn of a kernel whose warpgroups have roles: counts, and what runs while which products are in flight
    decoding  a steady turn of decoding: copies, instructions, clocks to issue beside memory's
    whole     a whole kernel: what comes before the loop and behind it, masked turns, blocks over multiprocessors
    ours      the kernels that cupyflash plans; flash_attention_2.json and flash_attention_3.json have FlashAttention's

`python benchmarks/machine_code` is the command.
"""
