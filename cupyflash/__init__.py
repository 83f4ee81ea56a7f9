"""Exact attention for CuPy arrays, beside a simulator that proves its memory traffic."""
