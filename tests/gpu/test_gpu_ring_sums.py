"""Sums of a ring on a GPU: one kernel adds what a call made, in place."""

from __future__ import annotations

import numpy as np
from chip import on_host

from cupyflash.distributed.sums import add_state
from cupyflash.merge import merged


def test_what_a_call_made_is_added_in_place_to_some_rows() -> None:
    import cupy

    random = np.random.default_rng(0)
    out, lse = random.standard_normal((2, 2, 20, 24), np.float32), random.standard_normal((2, 2, 20), np.float32)
    o, own = random.standard_normal((2, 2, 9, 24), np.float32).astype(np.float16), random.standard_normal((2, 2, 9), np.float32)
    lse[..., 6], own[..., :2] = -np.inf, -np.inf
    sums = [cupy.asarray(array) for array in (out, lse)]
    made = [cupy.asarray(array) for array in (o, own)]
    for _ in range(2):  # the second time by what is kept of the first
        out[..., 5:14, :], lse[..., 5:14] = merged(np, out[..., 5:14, :], lse[..., 5:14], o, own)
        add_state(True, sums[0][..., 5:14, :], sums[1][..., 5:14], *made)
    for found, expected in zip(on_host(*sums), (out, lse), strict=True):
        np.testing.assert_allclose(found, expected, rtol=3e-6, atol=3e-6)
