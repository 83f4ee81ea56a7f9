"""Happens-before and the races that follow: clocks of barriers, fences and atomics, and the shadow memory of accesses."""
