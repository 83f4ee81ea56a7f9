"""Decoding of parsed instructions into code to bind: a plan for each opcode, control flow, liveness, provenance of pointers."""
