"""Results of an H100 on file (h100.npz), and the program that took them from a longer record:  python tests/h100.py RECORD.npz

The record was made on 2026-11-27 (sm_90). It has, for each kernel of `test_ptx_h100` and by the spread of the numbers' exponents,
the registers' words of A and B and the values of C and D; and fetches from an image of 13 x 17 by each filter, kind of coordinates
(1: normalized) and address mode.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".npz")
SUMS = ("f16_k16", "bf16_k16", "f16_k8", "bf16_k8", "tf32_k8", "tf32_k4", "f16_acc16", "wg_f16", "wg_bf16")
SPREADS = (0, 4, 8, 12)
SHAPE = (2, 2, 4)
"""Filters, kinds of coordinates, address modes."""
FETCHES = 32


def sample(record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns of each kernel the first block of each spread, of wgmma's only of one; and the first fetches of each way."""
    out = {"image": record["tex_img"]}
    for name in SUMS:
        words, spreads = (512, (4,)) if name.startswith("wg") else (64 if name == "f16_acc16" else 128, SPREADS)
        there = [spread for spread in spreads if f"{name}_{spread}_D" in record]
        for matrix in "ABCD":
            parts = [
                record[f"{name}_{spread}_{matrix}"].reshape(len(record[f"{name}_{spread}_D"]) // words, -1)[0] for spread in there
            ]
            out[f"{name}_{matrix}"] = np.concatenate(parts)
    for what in "uvy":
        ways = product(*map(range, SHAPE))
        fetched = [record[f"tex_{filtered}_{normalized}_{mode}_{what}"][:FETCHES] for filtered, normalized, mode in ways]
        out[what] = np.array(fetched).reshape(*SHAPE, FETCHES)
    return out


if __name__ == "__main__":
    with np.load(sys.argv[1]) as record:
        np.savez_compressed(FILE, **sample(dict(record)))  # type: ignore[arg-type]
    print(f"{FILE}: {FILE.stat().st_size} bytes")
