"""From parsed instructions to code that can be bound: a plan for each opcode, control flow, liveness, what pointers may reach."""
