"""One expression in what Python and C have in common: read, derived, evaluated by NumPy, written in C.

`tree` says what an expression is made of and, in one table, what each operation is everywhere; `parse` reads one from text,
`derivative` makes another of it, `evaluate` is the reference, `c` what a kernel runs.
"""
