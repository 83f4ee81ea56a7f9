"""Expressions in the common part of Python and C: parsed, differentiated, evaluated by NumPy, written in C.

`tree` has the nodes of an expression and one table that defines each operation; `parse` reads an expression from text,
`derivative` differentiates it, `evaluate` is the reference, `c` writes what a kernel runs.
"""
