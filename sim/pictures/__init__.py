"""Sweeps, the papers' figures, and what draws them."""
